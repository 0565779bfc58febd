"""The watch over a sandbox's disk: bytes, files, and trees that cannot be measured."""

import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sandboxes.guest.files import deleted_files, disk_watch


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
    monkeypatch.setattr(disk_watch, "free_of", lambda _: (free[0], free[1]))
    monkeypatch.setattr(disk_watch, "WATCH_S", -1.0)
    return free


def watch(upper: int, limit: int, reserve: int) -> Callable[[], str | None]:
    return partial(disk_watch.DiskWatch(upper, limit, reserve).over, lambda: [os.getpid()])


def test_empty_files_count(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """A thousand empty files take inodes and no blocks; the watch sees the inodes go, and counts 4 kB each."""
    over = watch(upper, 1 << 20, 0)
    for number in range(1_000):
        (tmp_path / f"upper/{number}").touch()
    assert over() is None
    disk[1] -= 1_000 * 4_096
    assert over() == "disk"


def test_few_inodes_are_the_machine_s_fault(upper: int, disk: list[int]) -> None:
    over = watch(upper, 1 << 20, 1 << 20)
    disk[1] = 1 << 19
    assert over() == "host"


def test_deep_folders_end_the_call_that_makes_them(upper: int, tmp_path: Path, disk: list[int]) -> None:
    over = watch(upper, 64 << 20, 0)
    (tmp_path / "upper" / "/".join(["d"] * 300)).mkdir(parents=True)
    disk[0] -= 64 << 20
    assert over() == "depth"


def test_removal_of_deep_folders_is_not_ended(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """The call that removes them finds them at its beginning; it may not write without a limit either."""
    (tmp_path / "upper" / "/".join(["d"] * 300)).mkdir(parents=True)
    watched = disk_watch.DiskWatch(upper, 4 << 20, 0)
    watched.below_bytes, watched.unmeasured_free = 1 << 20, disk[0]
    over = partial(watched.over, list)
    disk[0] -= 2 << 20
    assert over() is None
    disk[0] -= 2 << 20
    assert over() == "disk"


def test_removal_of_too_much_is_not_ended_by_what_others_write(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """An earlier call has written too much. What is more than that ends a call as before."""
    path = tmp_path / "upper/file"
    path.write_bytes(bytes(10 << 20))
    watched = disk_watch.DiskWatch(upper, 8 << 20, 0)
    watched.held_bytes = 10 << 20
    disk[0] -= 2 << 20
    assert watched.over(list) is None
    path.write_bytes(bytes(12 << 20))
    disk[0] -= 2 << 20
    assert watched.over(list) == "disk"


def test_deleted_files_count_as_long_as_they_are_open(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """Another process has the file open: this one may have more descriptors, and deleted files, than a look reads."""
    path = tmp_path / "upper/deleted"
    with path.open("wb") as file:
        path.unlink()
        file.write(bytes(6 << 20))
        file.flush()
        holder = subprocess.Popen(["sleep", "60"], stdout=file)
    over = partial(disk_watch.DiskWatch(upper, 4 << 20, 0).over, lambda: [holder.pid])
    try:
        disk[0] -= 6 << 20
        assert over() == "disk"
    finally:
        holder.kill()
        holder.wait()
    disk[0] -= 6 << 20
    assert over() is None


def test_disk_decides_where_descriptors_are_too_many(
    upper: int, tmp_path: Path, disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that share many descriptors would keep pid 1 busy for minutes, while others of the sandbox write on."""
    over = watch(upper, 8 << 20, 0)
    monkeypatch.setattr(deleted_files, "MAX_DESCRIPTORS", 0)
    assert deleted_files.are_hidden([os.getpid()])
    for reason in (None, None, "host", "host"):
        disk[0] -= 3 << 20
        assert over() == reason
    (tmp_path / "upper/file").write_bytes(bytes(9 << 20))
    assert over() == "disk"
    (tmp_path / "upper/file").unlink()
    monkeypatch.undo()
    monkeypatch.setattr(disk_watch, "free_of", lambda _: (disk[0], disk[1]))
    monkeypatch.setattr(disk_watch, "WATCH_S", -1.0)
    assert over() is None


def test_many_descriptors_are_looked_at_once_in_a_while(
    upper: int, disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(deleted_files, "MAX_DESCRIPTORS", 0)
    watched = disk_watch.DiskWatch(upper, 8 << 20, 0)
    disk[0] -= 3 << 20
    for _ in range(5):
        assert watched.over(lambda: looks.append(1) or [os.getpid()]) is None  # type: ignore[func-returns-value]
    assert len(looks) == 1


def test_growth_in_small_steps_is_noticed(upper: int, tmp_path: Path, disk: list[int]) -> None:
    """Each look finds less than a step more, and others free as much as the sandbox takes."""
    over, path = watch(upper, 8 << 20, 0), tmp_path / "upper/file"
    path.write_bytes(bytes(10 << 20))
    disk[0] += 8 << 20
    assert over() is None
    disk[0] -= 2 << 20
    assert over() == "disk"
