"""Snapshots on disk: a file each, which holds a manifest and the driver's payload.

The first line of a file is the digest of the second, which is the manifest; that names the digest of the payload, which
is the rest. Both are compared whenever they are read. A file of another length than its manifest says is half written
and is removed at the next start, as is one of another version of its driver (`VersionedDriver`). Layers are written
without waiting for the disk, so after a reboot all snapshots are removed: a lost one costs time, a damaged one a wrong
answer.

A file is in the directory that the first two characters of its name give. ext4 puts these into block groups of their
own: without a journal, it passes over each file of a group that was removed in the last minute whenever it makes one
there.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from sandboxes.driver import Driver, FrozenState, VersionedDriver
from sandboxes.effects import StateDigest
from sandboxes.linux.file_flags import spread_below
from sandboxes.linux.files import boot_id, write_file
from snapshots.snapshot import Snapshot

_SHARE = 2
"""How many characters of a name give its directory: 256 directories. With fewer directories, each has more files that
were removed in the last minute; with more, the first snapshots make a directory each."""


class SnapshotStore:
    """All snapshots of a data directory. Manifests are in memory; payloads are read when a snapshot is restored."""

    def __init__(self, directory: Path, drivers: Mapping[str, Driver] | None = None) -> None:
        """Create a store that is not open yet; snapshots of other drivers than these are kept as they are."""
        self._directory = directory
        self._versions = {
            name: driver.state_version if isinstance(driver, VersionedDriver) else None
            for name, driver in (drivers or {}).items()
        }
        self._snapshots: dict[str, Snapshot] = {}
        self.checkpoint_bytes = 0  # Bytes of the snapshots that hold live processes.
        self.tree_bytes = Counter[int]()  # Bytes that the snapshots of each tree have added to the disk.

    def open(self) -> int:
        """Read manifests, remove damaged snapshots (all after a reboot), and return how many remain."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # The kernel makes a new boot id at each start of the machine.
        boot, mark = boot_id(), self._directory / "boot-id"
        # Without a mark the directory is new, or a loss of power took the mark: what is in it is not to be trusted.
        rebooted = not mark.exists() or mark.read_bytes() != boot.encode()
        spread_below(str(self._directory))
        for entry in sorted(self._directory.iterdir()):
            if len(entry.name) == _SHARE and entry.is_dir():
                for path in sorted(entry.iterdir()):
                    self._take(path, rebooted=rebooted)
            elif entry.is_file() and entry != mark:
                # Earlier versions wrote snapshots here.
                _remove(entry)
        # Last: a kill in between removes the rest of the old snapshots at the next start.
        mark.write_text(boot)
        return len(self._snapshots)

    def _take(self, path: Path, *, rebooted: bool) -> None:
        """Take over a snapshot's file, or remove it if it is of no use."""
        # A file that the disk does not give now costs its snapshot alone.
        with contextlib.suppress(OSError):
            if rebooted or (snapshot := self._read(path)) is None:
                _remove(path)
            else:
                self._add(snapshot)

    def _add(self, snapshot: Snapshot) -> Snapshot:
        self._snapshots[snapshot.id] = snapshot
        self.tree_bytes[snapshot.tree] += snapshot.size_bytes
        if snapshot.kind == "processes":
            self.checkpoint_bytes += snapshot.size_bytes
        return snapshot

    def _path(self, name: str) -> Path:
        return self._directory / name[:_SHARE] / name

    def save(self, frozen: FrozenState, *, tree: int, node: int, cost_s: float, age_s: float = 0.0) -> Snapshot:
        """Write a frozen state and return its snapshot. Blocking."""
        # `cost_s` is how long the freeze took, `age_s` for how long its live processes had run.

        # Random and not counted: a name is never used twice, so nothing stale can be mistaken for this snapshot.
        name = os.urandom(16).hex()
        state = frozen.state
        manifest: dict[str, Any] = {
            "tree": tree,
            "node": node,
            "driver": frozen.driver,
            "version": self._versions.get(frozen.driver),
            "kind": frozen.kind,
            "parts": list(frozen.parts),
            "size_bytes": frozen.size_bytes,
            "cost_s": cost_s,
            "age_s": age_s,
            "created_at": time.time(),
            "state": None if state is None else [state.exact.hex(), state.content.hex()],
        }
        payload = orjson.dumps(frozen.payload)
        manifest |= {"payload": _digest(payload), "payload_bytes": len(payload)}
        body = orjson.dumps(manifest)
        try:
            # New, because a file of this name would belong to another snapshot.
            content = b"%b\n%b\n%b" % (_digest(body).encode(), body, payload)
            folder = f"{self._directory}/{name[:_SHARE]}"
            try:
                write_file(f"{folder}/{name}", content, new=True)
            except FileNotFoundError:
                # The first snapshot in this directory.
                os.mkdir(folder)  # noqa: PTH102 - putting a `Path` together takes 5 us
                write_file(f"{folder}/{name}", content, new=True)
        # Whatever failed: half a file takes its bytes until the next start.
        except BaseException:
            _remove(self._path(name))
            raise
        return self._add(_snapshot(name, manifest))

    def load(self, snapshot: Snapshot) -> FrozenState:
        """Read what a driver needs to restore a snapshot, or raise FileNotFoundError or ValueError. Blocking."""
        manifest, content = _parts(self._path(snapshot.id).read_bytes())
        # A state with live processes has no digest.
        state = manifest["state"] and StateDigest(*(bytes.fromhex(digest) for digest in manifest["state"]))
        if _digest(content) != manifest["payload"]:
            raise ValueError("its payload is not what was written")
        payload: dict[str, Any] = orjson.loads(content)
        return FrozenState(
            snapshot.driver, snapshot.kind, payload, snapshot.size_bytes, state or None, tuple(manifest["parts"])
        )

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot. The driver's next `collect` frees the storage that only it used."""
        # Popped first, so that a second drop, and a `get` meanwhile, find nothing.
        if self._snapshots.pop(snapshot.id, None) is not None:
            self.tree_bytes[snapshot.tree] -= snapshot.size_bytes
            if not self.tree_bytes[snapshot.tree]:
                del self.tree_bytes[snapshot.tree]
            if snapshot.kind == "processes":
                self.checkpoint_bytes -= snapshot.size_bytes
            _remove(self._path(snapshot.id))

    def get(self, name: str | None) -> Snapshot | None:
        """Return a snapshot by its id; None if there is none, or for no id."""
        return None if name is None else self._snapshots.get(name)

    def _read(self, path: Path) -> Snapshot | None:
        """Return the snapshot in a file; None if it is half written, damaged, or of another driver's version."""
        try:
            manifest, content = _parts(path.read_bytes())
            version, driver = manifest["version"], manifest["driver"]
            usable = self._versions.get(driver, version) == version and len(content) == manifest["payload_bytes"]
            return _snapshot(path.name, manifest) if usable else None
        # A manifest of another version may lack members; such a snapshot is unusable here and is removed.
        except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError):
            return None

    def __iter__(self) -> Iterator[Snapshot]:
        # A copy: callers await and drop snapshots between two elements.
        return iter(list(self._snapshots.values()))

    def __len__(self) -> int:
        return len(self._snapshots)

    def of_tree(self, tree: int) -> list[Snapshot]:
        """Return the snapshots of a tree's nodes."""
        return [snapshot for snapshot in self._snapshots.values() if snapshot.tree == tree]


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    digest, _, rest = content.partition(b"\n")
    body, _, payload = rest.partition(b"\n")
    if digest != _digest(body).encode():
        raise ValueError("its manifest is not what was written")
    manifest: dict[str, Any] = orjson.loads(body)
    return manifest, payload


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _snapshot(name: str, manifest: dict[str, Any]) -> Snapshot:
    fields = ("tree", "node", "driver", "kind", "size_bytes", "cost_s", "created_at", "age_s")
    return Snapshot(name, parts=tuple(manifest["parts"]), **{field: manifest[field] for field in fields})


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
