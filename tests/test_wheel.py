"""The wheel installs beside packages with generic names, and works there."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

import forkpoint
from hatch_build import ANCHOR_SOURCE, COMPILED, FLAGS, HELPER, ROOMS, compile_helper, platform_of, rewritten
from sandboxes.linux import spawn
from tests.machine import Proxy, data_directory, require_sandboxes

REPOSITORY = Path(__file__).parents[1]
GENERIC = "proxy.py"
"""A package of the Python Package Index that installs a top-level `proxy`."""


@pytest.fixture(scope="module")
def release() -> Iterator[Path]:
    with TemporaryDirectory(prefix="forkpoint-release-test-") as folder:
        variables = os.environ | {"PYTHON": sys.executable, "FORKPOINT_RELEASE_IMAGE": "0"}
        subprocess.run([REPOSITORY / ".ci" / "release", folder], env=variables, check=True, capture_output=True)
        yield Path(folder)


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    """Return the wheel for this machine, which is the general one without a compiler."""
    return min(release.glob("*.whl"), key=lambda path: path.name.endswith("-any.whl"))


def test_release_has_a_wheel_for_every_system(release: Path) -> None:
    """Besides the wheel with the helpers: macOS and Windows have the client alone, which needs none."""
    (general,) = release.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(general) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_release_has_source_chart_notes_and_checksums(release: Path) -> None:
    version = forkpoint.__version__
    names = {path.name for path in release.iterdir()}
    assert names >= {f"forkpoint-{version}.tar.gz", f"forkpoint-chart-{version}.tgz", "NOTES.md", "SHA256SUMS"}
    with tarfile.open(release / f"forkpoint-chart-{version}.tgz") as chart:
        assert {"forkpoint/Chart.yaml", "forkpoint/values.yaml"} <= set(chart.getnames())
    sums = dict(line.split("  ")[::-1] for line in (release / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: sha256((release / name).read_bytes()).hexdigest() for name in names - {"SHA256SUMS"}}


def test_client_is_few_packages(release: Path, tmp_path: Path) -> None:
    """An empty environment has at most 15 packages then; the commands work, and `serve` says what it needs."""
    (general,) = release.glob("*-py3-none-any.whl")
    python = _environment(tmp_path / "venv", general)
    listed = "from importlib.metadata import distributions; print(*(each.name for each in distributions()))"
    installed = set(subprocess.check_output([python, "-c", listed], text=True).lower().split())
    assert len(installed) <= 15, installed
    started, listing = (
        subprocess.run([python, "-m", "forkpoint", *arguments], capture_output=True, text=True, check=False)
        for arguments in (["serve"], ["tasks", "--url", "http://127.0.0.1:1"])
    )
    assert (started.returncode, "pip install 'forkpoint[server]'" in started.stderr) == (1, True)
    assert "No proxy answers at http://127.0.0.1:1" in listing.stderr


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
        packed = archive.namelist()
    compiled = [
        target for source, target in COMPILED.items() if compile_helper(REPOSITORY / source, tmp_path / target.name)
    ]
    assert [target for target in COMPILED.values() if f"forkpoint/{target}" in packed] == compiled
    assert (
        f"-py3-none-{platform_of(tmp_path / target.name for target in compiled)}" if compiled else "-any"
    ) in wheel.name


def test_helpers_are_the_same_everywhere() -> None:
    """A checkout, a wheel and the image have all that C files of the repository are compiled into."""
    sources = {path.relative_to(REPOSITORY) for room in ROOMS for path in (REPOSITORY / room).rglob("*.c")}
    assert sources == set(COMPILED) == {HELPER, ANCHOR_SOURCE}
    assert set(FLAGS) == set(COMPILED.values())
    # What loads them looks for them where both kinds of installation put them.
    assert {Path(spawn.LIBRARY), Path(spawn.ANCHOR)} == {REPOSITORY / target for target in COMPILED.values()}
    # The image builds the wheel's way, with a compiler, and copies the result whole.
    build, _, final = (REPOSITORY / "docker" / "Dockerfile").read_text().partition("\nFROM $BASE\n")
    assert {"gcc", "libc6-dev"} <= set(build.split())
    assert re.search(r"pip install .*--no-build-isolation \.$", build, re.MULTILINE)
    copied = {word for line in build.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert copied >= {"hatch_build.py", *(source.parts[0] for source in COMPILED)}
    assert "COPY --from=build /opt/venv /opt/venv" in final
    # Neither leaves a helper out that lies in the context of the build.
    ignored = (REPOSITORY / ".dockerignore").read_text() if (REPOSITORY / ".dockerignore").exists() else ""
    assert not re.search(r"\.c$", ignored, re.MULTILINE)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([b""], "manylinux_2_17_x86_64"),
        ([b"\0libc.so.6\0GLIBC_2.2.5\0", b""], "manylinux_2_17_x86_64"),
        ([b"\0libc.so.6\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.9\0"], "manylinux_2_34_x86_64"),
        ([b"\0libc.musl-x86_64.so.1\0"], "linux_x86_64"),
    ],
)
def test_wheel_names_the_oldest_glibc(
    contents: list[bytes], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    assert platform_of([*tmp_path.iterdir(), tmp_path / "missing"]) == expected


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
    python = _environment(tmp_path / "venv", f"{wheel}[server]", GENERIC)
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
    """Return the Python of a new virtual environment with these packages; uv is faster, pip is everywhere.

    It has no pip of its own, and no byte code: to make these takes longer than all that the tests do in it.
    """
    python = folder / "bin" / "python"
    venv: list[object] = [sys.executable, "-m", "venv", "--without-pip", folder]
    install: list[object] = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
    if uv := shutil.which("uv"):
        venv, install = [uv, "venv", folder], [uv, "pip", "install", "--python", python]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for command in (venv, [*install, "--quiet", *packages]):
        subprocess.run([str(part) for part in command], check=True, env=environment)
    return python
