import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from hatch_build import ANCHOR_SOURCE, HELPER, compile_helper
from sandboxes.linux import spawn
from sandboxes.linux.files import remove_tree
from sandboxes.shell_files import copies
from tests.sandboxes import postgres_cluster as postgres
from tests.sandboxes.box import kept_driver

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def data_dir() -> Iterator[Path]:
    """One data directory for all: bases are built once. Not below pytest's, which is removed with less care."""
    # Beside a launcher that is root, it lies in the directory that the launcher is for (tests/test_beside_launcher.py).
    folder = Path(mkdtemp(prefix="forkpoint-test-", dir=os.environ.get("TEST_DATA", "/var/tmp")))
    folder.chmod(0o755)
    yield folder
    kept_driver.close()
    remove_tree(folder)


@pytest.fixture(scope="session")
def anchor_helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes a bash an anchor, compiled from its source."""
    return _compiled(ANCHOR_SOURCE, tmp_path_factory.mktemp("anchor") / "libanchor.so")


@pytest.fixture(scope="session")
def shell_folder(anchor_helper: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a shell that can be forked; a mount namespace can have them at their place."""
    if os.geteuid() != 0:
        pytest.skip("mounts the files of a shell, which needs root")
    folder = tmp_path_factory.mktemp("shell") / "made"
    copies.make(folder, anchor_helper)
    return folder


@pytest.fixture(params=["forked", "executed"])
def shells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How local sandboxes start shells: by forks where they can, or always by executing them."""
    if request.param == "executed":
        execute_shells(monkeypatch)
    elif not Path(spawn.ANCHOR).exists():
        pytest.skip("no C compiler has made the library for forks")
    return str(request.param)


def execute_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let local drivers make no files for forks of shells, as without a compiler."""
    monkeypatch.setattr(copies, "made_or_none", lambda _folder: None)


@pytest.fixture(scope="session")
def spawn_helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native library that starts programs, compiled from its source."""
    return _compiled(HELPER, tmp_path_factory.mktemp("helper") / "libvfork.so")


def _compiled(source: Path, target: Path) -> Path:
    if not compile_helper(REPOSITORY / source, target):
        pytest.skip("no C compiler works here")
    return target


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgres.Cluster]:
    """A PostgreSQL server of the tests' own, for all of them."""
    postgres.require_postgres()
    with postgres.cluster() as running:
        yield running


def checked_library(source: Path, target: Path) -> tuple[Path, dict[str, str]]:
    """Compile a library with the checks of AddressSanitizer and UBSan.

    Returns:
        The library, and the environment variables that a process needs to load it.
    """
    flags = ["-g", "-O1", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    try:
        subprocess.run(["gcc", *flags, "-o", target, source], cwd=REPOSITORY, check=True, capture_output=True)
        runtime = subprocess.check_output(["gcc", "-print-file-name=libasan.so"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("gcc or libasan is missing")
    options = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return target, {**options, "LD_PRELOAD": runtime}
