"""The wheel installs beside packages with generic names, and works there."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from hatch_build import HELPER, LIBRARY, compile_helper, rewritten
from tests.machine import Proxy, data_directory, require_sandboxes

REPOSITORY = Path(__file__).parents[1]
GENERIC = "proxy.py"
"""A package of the Python Package Index that installs a top-level `proxy`."""


@pytest.fixture(scope="module")
def wheel() -> Iterator[Path]:
    with TemporaryDirectory(prefix="forkpoint-wheel-test-") as folder:
        build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
        subprocess.run([sys.executable, "-c", build, folder], cwd=REPOSITORY, check=True, capture_output=True)
        (built,) = Path(folder).glob("*.whl")
        yield built


def test_wheel_has_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"forkpoint"}


def test_wheel_has_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "forkpoint", "proxy", "sandboxes", "snapshots"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    expected = {name if name.startswith("forkpoint/") else f"forkpoint/{name}" for name in listed}
    assert expected <= packed


def test_wheel_has_the_manual(wheel: Path) -> None:
    """The running proxy serves it offline."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {f"forkpoint/proxy/ui/manual/{name}" for name in ("index.html", "state.html", "llms.txt")} <= packed


def test_wheel_has_the_compiled_helper(wheel: Path, tmp_path: Path) -> None:
    """The wheel is then for this architecture and every version of Python. Without a compiler it has no helper."""
    with zipfile.ZipFile(wheel) as archive:
        has_helper = f"forkpoint/{LIBRARY}" in archive.namelist()
    assert has_helper == compile_helper(REPOSITORY / HELPER, tmp_path / LIBRARY.name)
    assert ("-py3-none-linux_" if has_helper else "-py3-none-any") in wheel.name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from proxy.tree.keys import key\n", "from forkpoint.proxy.tree.keys import key\n"),
        ("from sandboxes import spec\n", "from forkpoint.sandboxes import spec\n"),
        ("import sandboxes\n", "from forkpoint import sandboxes\n"),
        ("name = 'sandboxes.video.worker_engine'\n", "name = 'forkpoint.sandboxes.video.worker_engine'\n"),
        ('é = f"sandboxes.{x}.y"; b = 1\n', 'é = f"forkpoint.sandboxes.{x}.y"; b = 1\n'),
        ("run('import os; from proxy.cli import main')\n", "run('import os; from forkpoint.proxy.cli import main')\n"),
        ("from proxyz import a\nproxy = 'proxy'\n", "from proxyz import a\nproxy = 'proxy'\n"),
    ],
)
def test_imports_of_rooms_are_rewritten(before: str, after: str) -> None:
    assert rewritten(before, "module.py") == after


def test_unmovable_import_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"module\.py:1"):
        rewritten("import proxy.tree\n", "module.py")


def test_wheel_serves_calls_beside_a_generic_proxy_package(wheel: Path, tmp_path: Path) -> None:
    """Install the wheel and PyPI's `proxy.py` into a fresh environment, start the proxy, make a miss and a hit."""
    require_sandboxes()
    python = _environment(tmp_path / "venv", wheel, GENERIC)
    names = subprocess.run(
        [python, "-c", ("import proxy, forkpoint; print(proxy.__file__); import forkpoint.proxy.app, sys; "
         "print([name for name in ('sandboxes', 'snapshots') if name in sys.modules], forkpoint.__version__)")],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    ).stdout.splitlines()  # fmt: skip
    assert names[0].endswith("/site-packages/proxy/__init__.py")
    assert names[1].startswith("[] ")
    with data_directory() as data:
        proxy = Proxy(data, python=str(python))
        proxy.start()
        try:
            missed, hit = (_call(proxy, rollout) for rollout in ("1", "2"))
        finally:
            proxy.stop()
    assert (missed["stdout"], hit) == ("built\n", missed)


def _call(proxy: Proxy, rollout: str) -> Any:
    url = f"{proxy.url}/t/task/r/{rollout}/shell/exec"
    return httpx.post(url, json={"command": "echo built | tee app"}, timeout=60).raise_for_status().json()


def _environment(folder: Path, *packages: object) -> Path:
    """Return the Python of a new virtual environment with these packages; uv is faster, pip is everywhere."""
    python = folder / "bin" / "python"
    if uv := shutil.which("uv"):
        commands = [[uv, "venv", "--quiet", folder], [uv, "pip", "install", "--quiet", "--python", python, *packages]]
    else:
        commands = [[sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "--quiet", *packages]]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for command in commands:
        subprocess.run([str(part) for part in command], check=True, env=environment)
    return python
