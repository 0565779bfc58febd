"""The watch over a sandbox's disk: bytes, files, and trees that cannot be measured."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.guest.files import changes


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "upper").mkdir()
    fd = os.open(tmp_path / "upper", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the free bytes and the inodes' bytes of the disk, and let every look measure."""
    free = [1 << 40, 1 << 40]
    monkeypatch.setattr(changes, "_free", lambda _: (free[0], free[1]))
    monkeypatch.setattr(changes, "WATCH_S", -1.0)
    return free


def test_empty_files_count(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """A thousand empty files take inodes and no blocks; the watch sees the inodes go, and counts 4 kB each."""
    over = changes.disk_watch(upper, 1 << 20, 0)
    for number in range(1_000):
        (tmp_path / f"upper/{number}").touch()
    assert over() is None
    disk[1] -= 1_000 * 4_096
    assert over() == "disk"


def test_few_inodes_are_the_machine_s_fault(upper: int, disk: list[int]) -> None:
    over = changes.disk_watch(upper, 1 << 20, 1 << 20)
    disk[1] = 1 << 19
    assert over() == "host"


def test_deep_folders_end_the_call_that_makes_them(upper: int, tmp_path: Path, disk: list[int]) -> None:
    over = changes.disk_watch(upper, 64 << 20, 0)
    (tmp_path / "upper" / "/".join(["d"] * 300)).mkdir(parents=True)
    disk[0] -= 64 << 20
    assert over() == "depth"


def test_removal_of_deep_folders_is_not_ended(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """The call that removes them finds them at its beginning; it may not write without a limit either."""
    (tmp_path / "upper" / "/".join(["d"] * 300)).mkdir(parents=True)
    over = changes.disk_watch(upper, 4 << 20, 0, below_bytes=1 << 20, unmeasured_free=disk[0])
    disk[0] -= 2 << 20
    assert over() is None
    disk[0] -= 2 << 20
    assert over() == "disk"
