"""The driver and the dialect of docs/extending.md work as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import Proxy, data_directory, require_curl

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
PROGRAMS = dict(re.findall(r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)
METADATA = "\n".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay the page's package out as an installed distribution, in a directory for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("package")
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
    metadata = folder / "forkpoint_notebook-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: forkpoint-notebook\nVersion: 1.0\n")
    entries = METADATA.partition("[project.entry-points")[2].replace("[project.entry-points.", "[").replace('"', "")
    (metadata / "entry_points.txt").write_text("[" + entries.removeprefix("."))
    return folder


def test_driver_of_the_page_keeps_the_contract(package: Path) -> None:
    run = subprocess.run(  # noqa: PLW1510 - a failure is looked at
        [sys.executable, "-m", *COMMANDS[0].split(), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=package, env=os.environ | {"PYTHONPATH": str(package)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "9 passed" in run.stdout or "8 passed, 1 skipped" in run.stdout


def test_contract_notices_a_wrong_digest(package: Path, tmp_path: Path) -> None:
    """A driver whose digest misses a change fails the suite: the suite can fail."""
    for path in package.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text().replace("json.dumps(self._notes, sort_keys=True)", "''"))
    run = subprocess.run(  # noqa: PLW1510 - a failure is looked at
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_notebook.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "test_change_has_an_effect_and_a_new_digest" in run.stdout.partition("short test summary")[2]


def test_proxy_serves_the_page_s_endpoint(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's commands give the page's answers."""
    require_curl()
    monkeypatch.setenv("PYTHONPATH", str(package))
    with data_directory() as data:
        proxy = Proxy(data, {"drivers": '["notebook"]'})
        proxy.start()
        try:
            answers = [
                subprocess.run(
                    ["bash", "-c", line.replace(":8700/", f":{proxy.port}/")],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
                for line in COMMANDS[2].splitlines()
            ]
        finally:
            proxy.stop()
    assert '"driver":"notebook"' in answers[0]
    assert "forkpoint; fwd=miss" in answers[1]
    assert "forkpoint; hit" in answers[2]
    assert answers[3].endswith('\n"two"')
