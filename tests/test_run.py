"""`./run` works for a newcomer: a fresh clone, and nothing but Python on the PATH."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer

from forkpoint.ephemeral_proxy import free_port
from proxy.cli.main import app
from tests.machine import require_sandboxes, wait_until

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a clone of the last commit, and an environment whose PATH holds Python and nothing else."""
    folder = tmp_path_factory.mktemp("newcomer")
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder / "forkpoint"], check=True)
    (folder / "bin").mkdir()
    # The interpreter itself, not that of our virtual environment.
    (folder / "bin" / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP"))}
    # What is imported is compiled then; pip would compile all packages, which takes longer.
    return folder / "forkpoint", kept | {"PATH": str(folder / "bin"), "HOME": str(folder), "PIP_NO_COMPILE": "1"}


def test_run_installs_and_serves(newcomer: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """The first `./run serve` installs with pip alone and then answers calls."""
    require_sandboxes()
    clone, environment = newcomer
    port = free_port()
    command = ["./run", "serve", "--port", str(port), "--data", str(tmp_path / "data")]
    with subprocess.Popen(command, cwd=clone, env=environment, stderr=subprocess.PIPE) as server:
        try:
            wait_until(lambda: _answers(port, server), "the proxy does not answer", within_s=300)
            call = httpx.post(f"http://127.0.0.1:{port}/t/task/r/1/shell/exec", json={"command": "echo hi"}, timeout=60)
            assert call.json()["stdout"] == "hi\n"
        finally:
            server.terminate()
            _, log = server.communicate(timeout=60)
    assert b"Installing requirements.txt into .venv (once)" in log
    # An installed checkout starts without installing again.
    again = subprocess.run(
        ["./run", "--version"], cwd=clone, env=environment, check=True, capture_output=True, text=True
    )
    assert (re.fullmatch(r"forkpoint [\d.]+", again.stdout.strip()) is not None, again.stderr) == (True, "")


def test_run_explains_its_commands() -> None:
    shown = subprocess.run([REPOSITORY / "run", "--help"], check=True, capture_output=True, text=True).stdout
    assert all(f"./run {command}" in shown for command in ("serve", "test", "test --all", "check", "docs", "wheel"))
    # The list is written by hand, because `./run` needs nothing installed.
    listed = shown.partition("COMMAND --help explains one:")[2].partition("\n\n")[0].split()
    assert listed == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("lock", ["requirements.txt", "requirements-dev.txt"])
def test_locks_name_every_dependency_with_a_digest(lock: str) -> None:
    """A dependency that is missing from a lock would not be installed by `./run`."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    wanted = [
        name
        for table in ("dependencies = [", "server = [")
        for name in re.findall(
            r'^    "([\w-]+)(?:\[\w+\])?[<>=]', project.partition(f"\n{table}")[2].partition("\n]")[0], re.MULTILINE
        )
    ]
    locked = re.findall(
        r"^([\w-]+)(?:\[\w+\])?==(\S+).*?((?:\\\n    --hash=sha256:\w+ ?)+)",
        (REPOSITORY / lock).read_text(),
        re.MULTILINE,
    )
    assert len(wanted) > 10
    assert set(wanted) <= {name for name, _, _ in locked}


def _answers(port: int, server: "subprocess.Popen[bytes]") -> bool:
    assert server.poll() is None, "the proxy ended"
    try:
        # Cheap, so that what is waited for has the CPU.
        socket.create_connection(("127.0.0.1", port)).close()
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).is_success
    except (ConnectionError, httpx.TransportError):
        return False
