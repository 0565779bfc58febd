"""Snapshots on disk: saved ones are loaded; half-written, damaged and doubtful ones are removed."""

import errno
import os
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.driver import Driver, FrozenState
from sandboxes.effects import StateDigest
from snapshots.store import SnapshotStore
from tests.machine import snapshot_files
from tests.sandboxes.memory_driver import MemoryDriver

FROZEN = FrozenState("memory", "files", {"files": {}}, 7, StateDigest(b"e" * 32, b"c" * 32), ("p1", "p2"))

json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
digests = st.builds(StateDigest, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
states = st.builds(
    FrozenState,
    driver=st.text(),
    kind=st.text(),
    payload=st.dictionaries(st.text(), json, max_size=4),
    size_bytes=st.integers(0, 1 << 50),
    state=st.none() | digests,
    parts=st.lists(st.text(), max_size=3).map(tuple),
)


def opened(directory: Path) -> SnapshotStore:
    store = SnapshotStore(directory)
    store.open()
    return store


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in snapshot_files(directory))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frozen=states, tree=st.integers(1, 1 << 60), node=st.integers(1, 1 << 60))
def test_saved_snapshots_are_loaded_after_a_restart(tmp_path: Path, frozen: FrozenState, tree: int, node: int) -> None:
    store = opened(tmp_path)
    saved = store.save(frozen, tree=tree, node=node, cost_s=0.5)
    assert store.load(saved) == frozen
    again = opened(tmp_path)
    loaded = again.get(saved.id)
    assert loaded is not None
    assert (loaded.tree, loaded.node, loaded.parts, loaded.size_bytes) == (tree, node, frozen.parts, frozen.size_bytes)
    assert again.load(loaded) == frozen
    again.drop(loaded)


def half_written(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def empty(entry: Path) -> None:
    entry.write_bytes(b"")


def torn(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:50])


def of_another_kind(entry: Path) -> None:
    entry.write_bytes(b'{"tree": 1}')


def signed(body: bytes) -> bytes:
    return f"{blake2b(body, digest_size=16).hexdigest()}\n".encode() + body + b"\n"


def a_list(entry: Path) -> None:
    entry.write_bytes(signed(b"[1]"))


def without_members(entry: Path) -> None:
    entry.write_bytes(signed(b'{"tree": 1}'))


@pytest.mark.parametrize("damage", [half_written, empty, torn, of_another_kind, a_list, without_members])
def test_damaged_snapshots_are_removed_at_start(tmp_path: Path, damage: Any) -> None:
    store = opened(tmp_path)
    kept, damaged = (store.save(FROZEN, tree=1, node=node, cost_s=0.1) for node in (1, 2))
    [path] = (path for path in snapshot_files(tmp_path) if path.name == damaged.id)
    damage(path)
    assert [snapshot.id for snapshot in opened(tmp_path)] == [kept.id]
    assert entries(tmp_path) == [kept.id]


@given(st.integers(0, 1 << 20), st.integers(0, 7))
def test_a_flipped_bit_is_never_loaded(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    """A damaged payload would be restored as another state, so its digest is compared before it is used."""
    folder = tmp_path_factory.mktemp("snapshots")
    store = opened(folder)
    saved = store.save(replace(FROZEN, payload={"x": "abc"}), tree=1, node=1, cost_s=0.1)
    [path] = snapshot_files(folder)
    content = bytearray(path.read_bytes())
    is_payload = at % len(content) >= len(content) - len(b'{"x":"abc"}')
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not what was written"):
        store.load(saved)
    assert len(opened(folder)) == is_payload


class OfVersion(MemoryDriver):
    def __init__(self, state_version: str) -> None:
        super().__init__()
        self.state_version = state_version


def test_snapshots_of_another_driver_version_are_removed(tmp_path: Path) -> None:
    """Their payload may mean another state to this version; those of a driver that is turned off are kept."""

    def at_start(drivers: dict[str, Driver]) -> int:
        store = SnapshotStore(tmp_path, drivers)
        count = store.open()
        if not count:
            store.save(FROZEN, tree=1, node=1, cost_s=0.1)
        return count

    assert at_start({"memory": OfVersion("1")}) == 0
    assert at_start({"memory": OfVersion("1")}) == 1
    assert at_start({}) == 1
    assert at_start({"memory": OfVersion("2")}) == 0
    assert at_start({"memory": MemoryDriver()}) == 0


def test_snapshots_without_a_boot_mark_are_removed(tmp_path: Path) -> None:
    """A loss of power soon after the first start took the mark, so nobody knows on which boot they were written."""
    opened(tmp_path).save(FROZEN, tree=1, node=1, cost_s=0.1)
    (tmp_path / "boot-id").unlink()
    assert len(opened(tmp_path)) == 0


def test_an_unreadable_snapshot_is_no_reason_not_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sector of the disk cannot be read now. The others are there, and this one may be again."""
    store = opened(tmp_path)
    kept, unreadable = (store.save(FROZEN, tree=1, node=node, cost_s=0.1) for node in (1, 2))
    read = Path.read_bytes

    def fails(path: Path) -> bytes:
        if path.name == unreadable.id:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        assert [snapshot.id for snapshot in opened(tmp_path)] == [kept.id]
    assert len(opened(tmp_path)) == 2


@pytest.mark.parametrize("mark", [b"another boot", b"", b"\xff\xfe"])
def test_a_reboot_or_a_damaged_mark_removes_every_snapshot(tmp_path: Path, mark: bytes) -> None:
    opened(tmp_path).save(FROZEN, tree=1, node=1, cost_s=0.1)
    (tmp_path / "boot-id").write_bytes(mark)
    assert opened(tmp_path).open() == 0
    assert entries(tmp_path) == []


def test_dropped_snapshots_stay_gone_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    saved = store.save(FROZEN, tree=1, node=1, cost_s=0.1)
    store.drop(saved)
    store.drop(saved)
    assert store.get(saved.id) is None
    assert list(store) == []
    assert entries(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        store.load(saved)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    store = opened(tmp_path)
    too_large = FrozenState("memory", "files", {"n": 1 << 70}, 1, None)
    with pytest.raises(TypeError):
        store.save(too_large, tree=1, node=1, cost_s=0.1)
    assert list(store) == []
    assert entries(tmp_path) == []
