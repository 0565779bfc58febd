"""The data directory is the proxy's own user's alone."""

import stat
import threading
from pathlib import Path

import pytest

from proxy.engine import HAND_OVER_S
from proxy.server import GRACE_S
from proxy.storage import data_dir
from proxy.storage.data_dir import make_private, owning
from proxy.storage.errors import StoreError
from sandboxes.linux.dir_lock import DirLock, is_unowned
from tests.machine import assert_spread
from tests.proxy.serving import serving


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_open_data_directory_is_closed_at_start(tmp_path: Path) -> None:
    """A directory that an earlier version left open to everybody is closed before the first request."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with serving(data) as proxy:
        proxy.exec("r", "echo 1 > f")
        assert mode_of(data) == 0o700
        files = {path.name: mode_of(path) for path in data.glob("forkpoint.sqlite*")}
        assert set(files.values()) == {0o600}, files


def test_new_data_directory_is_private(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a" / "b") == 0o700


def test_snapshots_lie_apart_on_ext4(tmp_path: Path) -> None:
    """Files of snapshots are not made among those that others have just deleted."""
    make_private(tmp_path / "data")
    assert_spread(tmp_path / "data", tmp_path)


def test_shared_directories_are_refused_as_data(tmp_path: Path) -> None:
    """`data = /tmp` would lock every other program of the machine out of it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for path in (shared, Path("/")):
        before = mode_of(path)
        with pytest.raises(StoreError, match="belongs to other programs"):
            make_private(path)
        assert mode_of(path) == before


def test_workers_of_a_killed_proxy_are_awaited(tmp_path: Path) -> None:
    """Their proxy was killed, and its next one is started at once: they take a moment to end."""
    worker = DirLock(tmp_path / "worker-0")
    worker.acquire()
    ending = threading.Timer(0.3, worker.release)
    ending.start()
    with owning(tmp_path):
        assert is_unowned(tmp_path / "worker-0")
    ending.join()
    # Workers wait for the requests of their clients, each time in vain if these were for one that is gone. Then members
    # of a cluster hand their tasks over.
    assert data_dir._ENDING_S > GRACE_S + HAND_OVER_S + 10
