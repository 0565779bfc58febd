"""How many sandboxes have room, by what the machine and its control groups give."""

import resource
from pathlib import Path

import pytest

from sandboxes.linux import cgroups
from sandboxes.linux.cgroups import Bounded
from sandboxes.pool import room
from sandboxes.pool.room import Room, RoomBound, available_bytes, open_more_files

GB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without limits but those that a test sets."""
    monkeypatch.setattr(room, "available_bytes", lambda: 256 * GB)
    monkeypatch.setattr(room, "_total_bytes", lambda: 256 * GB)
    monkeypatch.setattr(room, "_processes", lambda: [Bounded(1 << 22, 500)])
    monkeypatch.setattr(room, "_number", lambda _: cgroups.UNLIMITED)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    return monkeypatch


def test_a_setting_is_the_bound(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(room, "available_bytes", lambda: 0)
    assert Room(7).bound(3) == RoomBound(7, "max_sandboxes", "raise max_sandboxes")


@pytest.mark.usefixtures("machine")
def test_a_large_machine_has_room_for_thousands() -> None:
    assert Room(None).bound(0).most == 4096


def test_memory_bounds_and_what_lives_already_counts_as_room(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(room, "available_bytes", lambda: 33 * GB)
    assert Room(None).bound(100) == RoomBound(100 + GB // room.SANDBOX_BYTES, "memory", "give it more memory")
    # Two workers have half of what is free, and each what it has.
    assert Room(None, workers=2).bound(100).most == 100 + GB // 2 // room.SANDBOX_BYTES


def test_less_memory_than_its_reserve_takes_room_away(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(room, "available_bytes", lambda: 31 * GB)
    assert Room(None).bound(500).most == 500 - -(-GB // room.SANDBOX_BYTES)
    assert Room(None).bound(20).most == 1


def test_half_of_the_memory_is_for_others(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(room, "_total_bytes", lambda: 8 * GB)
    assert Room(None).bound(0)[:2] == (4 * GB // room.SANDBOX_BYTES, "memory")


def test_open_files_bound(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(resource, "getrlimit", lambda _: (20_000, 20_000))
    assert Room(None, other_files=8_000).bound(0)[:2] == (1_500, "open files")
    # Connections leave a quarter.
    assert Room(None, other_files=30_000).bound(0)[:2] == (625, "open files")


def test_pipes_bound(machine: pytest.MonkeyPatch) -> None:
    """Beyond, the answers of all sandboxes may show that there are too many."""
    machine.setattr(room, "_number", lambda path: {"/proc/sys/fs/pipe-user-pages-soft": 16_384}[path])
    machine.setattr(room, "_LOOK_S", 0.0)
    own = Room(None)
    assert own.bound(0)[:2] == (14_336 // room.SANDBOX_PIPE_PAGES, "pipes")
    # Tool servers have pipes too, of which a room does not know.
    own.note_shortage()
    assert [own.bound(live)[:2] for live in (256, 230)] == [(224, "pipes")] * 2
    own.note_shortage()
    assert own.bound(5).most == 14_336 // 2 // 60


def test_processes_bound(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(room, "_processes", lambda: [Bounded(1 << 22, 500), Bounded(800, 300)])
    assert Room(None).bound(10)[:2] == (10 + 400 // room.SANDBOX_PROCESSES, "processes")


def test_a_look_counts_for_a_second(machine: pytest.MonkeyPatch) -> None:
    memory = iter([33 * GB, 90 * GB])
    machine.setattr(room, "available_bytes", lambda: next(memory))
    machine.setattr(room, "_LOOK_S", 3600.0)
    own = Room(None)
    assert len({own.bound(0) for _ in range(100)}) == 1


def test_this_machine_has_room() -> None:
    assert Room(None).bound(0).most > 10


@pytest.mark.parametrize("old", [True, False])
def test_limits_of_groups_count_without_pages_of_files(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In version 1 and 2: a group above with a limit, and an own one without."""
    above, own = tmp_path / "above", tmp_path / "above" / "own"
    own.mkdir(parents=True)
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    prefix = "total_" if old else ""
    for group, text in ((above, str(4 * GB)), (own, str((1 << 63) - 4096) if old else "max")):
        (group / limit).write_text(text)
        (group / used).write_text(str(3 * GB))
        (group / "memory.stat").write_text(f"{prefix}inactive_file {GB}\n{prefix}active_file {GB}\nanon 5\n")
        (group / "pids.max").write_text("max")
        (group / "pids.current").write_text("12")
    monkeypatch.setattr(cgroups, "_own_and_above", lambda _: [own, above, tmp_path])
    bounds = cgroups.own_bounds(cgroups.MEMORY)
    assert bounds[0].limit >= 1 << 62
    assert bounds[1:] == [Bounded(4 * GB, GB)]
    assert available_bytes() <= 3 * GB
    assert cgroups.own_bounds(cgroups.PIDS) == 2 * [Bounded(cgroups.UNLIMITED, 12)]


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        open_more_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_available_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1234 kB\n")
    assert available_bytes(meminfo) == 1234 << 10
    assert available_bytes(tmp_path / "nothing") > 1 << 50
    assert 1 << 20 < available_bytes() < 1 << 50
