"""The commands of README and of the quickstart do what the pages say."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from forkpoint.ephemeral_proxy import free_port
from proxy.cli.doctor import check
from proxy.settings import Settings
from tests.machine import require_curl, require_sandboxes, wait_until

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").is_success
    except httpx.TransportError:
        return False


@contextmanager
def serving(command: str, directory: Path, port: int) -> Iterator[None]:
    """Run README's first command until the block ends; `test_run.py` tests how `./run` installs."""
    words = [str(Path(sys.executable).parent / "forkpoint"), *command.removeprefix("./run ").split()]
    environment = os.environ | {"FORKPOINT_PORT": str(port)}
    process = subprocess.Popen(words, cwd=directory, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_ready(port), "the proxy is not ready", within_s=60)
        yield
    finally:
        process.terminate()
        # Having closed everything, it ends by the signal that it was sent.
        assert process.wait(30) == -signal.SIGTERM


def test_first_two_commands_serve_and_test() -> None:
    """CI runs the tests through the command that README gives."""
    assert BLOCKS[:2] == ["./run serve", "./run test"]
    assert "\n./run test --all\n" in (REPOSITORY / ".ci" / "run").read_text()


def test_first_calls_answer_as_shown(tmp_path: Path) -> None:
    missing = [need for need in check(tmp_path / "check") if need.required and not need.ok]
    if missing:
        pytest.skip(f"this machine cannot run sandboxes: {missing[0].name}: {missing[0].detail}")
    require_curl()
    port = free_port()
    with serving(BLOCKS[0], tmp_path, port):
        answers = []
        for line in BLOCKS[2].splitlines():
            start = time.monotonic()
            command = line.replace(":8700/", f":{port}/")
            answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
            answers.append((answer, time.monotonic() - start))
        (first, first_s), (second, _), (third, _) = answers
        assert "forkpoint; fwd=miss; stored" in first
        assert "forkpoint; hit" in second
        assert first.split("\n\n")[-1] == second.split("\n\n")[-1], "the same answer, date and all"
        assert first_s > 2
        assert '"stdout":"built\\n"' in third
        shown = subprocess.run(
            [Path(sys.executable).parent / "forkpoint", "tree", "demo", "--url", f"http://127.0.0.1:{port}"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for shown_text in ("n1 start", "n2 sleep 2; echo built > app; date", "files", "1 hit", "cat app", "1, 2"):
            assert shown_text in shown


def test_quickstart_leads_to_a_fork(tmp_path: Path) -> None:
    """Every command of the page after the start, but for `forkpoint open`, which starts a browser."""
    require_sandboxes()
    require_curl()
    page = (REPOSITORY / "docs" / "quickstart.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks[2:] for line in block.splitlines() if line != "forkpoint open demo"]
    port = free_port()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "FORKPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    with serving(BLOCKS[0], tmp_path, port):
        missed, hit, read, _, fork, original, tree = (
            subprocess.run(
                ["bash", "-c", line.replace(":8700/", f":{port}/")],
                capture_output=True, text=True, check=True, env=environment, cwd=tmp_path,
            ).stdout
            for line in lines
        )  # fmt: skip
    assert "forkpoint; fwd=miss; stored" in missed
    assert "forkpoint; hit" in hit
    assert '"stdout":"built\\n"' in read
    assert '"stdout":"other\\n"' in fork
    assert '"stdout":"built\\n"' in original
    assert "echo other > app; cat app" in tree


def test_documented_drivers_keep_the_default_ones() -> None:
    """A line that turns a driver on turns none of the default ones off, but for a proxy in a container of its own."""
    default = set(Settings.model_fields["drivers"].default)
    for page in [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md")]:
        for prefix, drivers in re.findall(r"(-e )?FORKPOINT_DRIVERS='(\[.*?\])'", page.read_text()):
            assert prefix or default <= set(json.loads(drivers)), f"{page.name}: {drivers}"


@pytest.mark.parametrize("page", sorted(REPOSITORY.glob("*.md")) + sorted(REPOSITORY.glob("docs/**/*.md")), ids=str)
def test_links_between_pages_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
