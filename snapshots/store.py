"""Snapshots on disk: a directory each, with the driver's payload and a manifest that is written last.

A directory without a manifest is half written and is removed at the next start. Layers are written without waiting for
the disk, so after a reboot no snapshot can be trusted, and all are removed: a lost snapshot costs time, a damaged one a
wrong answer.

A snapshot of another version of its driver is removed too (`VersionedDriver`): its payload may mean something else.

A manifest begins with a line that holds its own digest, and it names the digest of the payload. Both are compared
whenever they are read.
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from sandboxes.driver import Driver, FrozenState, VersionedDriver
from sandboxes.effects import StateDigest
from sandboxes.linux.files import boot_id
from snapshots.snapshot import Snapshot

_MANIFEST, _DRAFT, _PAYLOAD = "manifest.json", "draft", "payload.json"


class SnapshotStore:
    """All snapshots of a data directory. Manifests are in memory; payloads are read when a snapshot is restored."""

    def __init__(self, directory: Path, drivers: Mapping[str, Driver] | None = None) -> None:
        """Create a store that is not open yet.

        Args:
            directory: Where the snapshots are.
            drivers: The drivers by name, for their versions. Snapshots of other drivers are kept as they are.
        """
        self._directory = directory
        self._versions = {
            name: driver.state_version if isinstance(driver, VersionedDriver) else None
            for name, driver in (drivers or {}).items()
        }
        self._snapshots: dict[str, Snapshot] = {}

    def open(self) -> int:
        """Read the manifests, remove half-written and damaged snapshots, and return how many remain.

        After a reboot of the machine all snapshots are removed.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        # The kernel makes a new boot id at each start of the machine.
        boot, mark = boot_id(), self._directory / "boot-id"
        # Without a mark the directory is new, or a loss of power took the mark: what is in it is not to be trusted.
        rebooted = not mark.exists() or mark.read_text() != boot
        for entry in sorted(self._directory.iterdir()):
            if entry == mark:
                continue
            # No manifest means that a kill came before the rename in `save`.
            snapshot = None if rebooted else self._read(entry)
            if snapshot is None:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                self._snapshots[snapshot.id] = snapshot
        # Last: a kill in between removes the rest of the old snapshots at the next start.
        mark.write_text(boot)
        return len(self._snapshots)

    def save(self, frozen: FrozenState, *, tree: int, node: int, cost_s: float) -> Snapshot:
        """Write a frozen state and return its snapshot. Blocking: some hundred microseconds.

        Args:
            frozen: What the driver froze.
            tree: Number of the tree.
            node: Number of the node.
            cost_s: Seconds that the freeze took.

        Raises:
            OSError: The disk is full, for example. What was written is removed, now or at the next start.
        """
        # Random and not counted: a name is never used twice, so nothing stale can be mistaken for this snapshot.
        name = uuid.uuid4().hex
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
            "created_at": time.time(),
            "state": None if state is None else [state.exact.hex(), state.content.hex()],
        }
        # Without `exist_ok`: a directory under this name would belong to another snapshot.
        directory = self._directory / name
        directory.mkdir()
        try:
            payload = orjson.dumps(frozen.payload)
            (directory / _PAYLOAD).write_bytes(payload)
            manifest["payload"] = _digest(payload)
            # Written under another name, so that a kill in the middle leaves no manifest at all.
            draft = directory / _DRAFT
            body = orjson.dumps(manifest)
            draft.write_bytes(f"{_digest(body)}\n".encode() + body)
            # The manifest comes last and by a rename: with a manifest a snapshot is whole.
            draft.rename(directory / _MANIFEST)
        # Whatever failed: a directory without a manifest holds its bytes until the next start.
        except BaseException:
            _remove(directory)
            raise
        # Known only when whole. The method runs in a thread, but adding one key to a dictionary is atomic under the
        # GIL.
        self._snapshots[name] = _snapshot(name, manifest)
        return self._snapshots[name]

    def load(self, snapshot: Snapshot) -> FrozenState:
        """Read what a driver needs to restore a snapshot. Blocking.

        Raises:
            FileNotFoundError, ValueError: The snapshot is missing or damaged.
            OSError: The machine cannot read it now.
        """
        directory = self._directory / snapshot.id
        manifest = _manifest(directory)
        # A state with live processes has no digest.
        state = manifest["state"] and StateDigest(*(bytes.fromhex(digest) for digest in manifest["state"]))
        content = (directory / _PAYLOAD).read_bytes()
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
            _remove(self._directory / snapshot.id)

    def get(self, name: str | None) -> Snapshot | None:
        """Return a snapshot by its id; None if there is none, or for no id."""
        return None if name is None else self._snapshots.get(name)

    def _read(self, directory: Path) -> Snapshot | None:
        """Return the snapshot in a directory; None if it is half written, damaged, or of another driver's version."""
        try:
            manifest = _manifest(directory)
            version, driver = manifest.get("version"), manifest["driver"]
            usable = self._versions.get(driver, version) == version
            return _snapshot(directory.name, manifest) if usable else None
        # A manifest of another version may lack members; such a snapshot is unusable here and is removed.
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None

    def __iter__(self) -> Iterator[Snapshot]:
        # A copy: callers await and drop snapshots between two elements.
        return iter(list(self._snapshots.values()))

    def __len__(self) -> int:
        return len(self._snapshots)


def _manifest(directory: Path) -> dict[str, Any]:
    """Return a manifest.

    Raises:
        ValueError: It is not what was written.
        OSError: It cannot be read.
    """
    digest, _, body = (directory / _MANIFEST).read_bytes().partition(b"\n")
    if digest != _digest(body).encode():
        raise ValueError("its manifest is not what was written")
    manifest: dict[str, Any] = orjson.loads(body)
    return manifest


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _snapshot(name: str, manifest: dict[str, Any]) -> Snapshot:
    fields = ("tree", "node", "driver", "kind", "size_bytes", "cost_s", "created_at")
    return Snapshot(name, parts=tuple(manifest["parts"]), **{field: manifest[field] for field in fields})


def _remove(directory: Path) -> None:
    """Remove a snapshot's directory without listing it, which needs a descriptor. The next start removes leftovers."""
    with contextlib.suppress(OSError):
        # The manifest goes first: after a kill in between, the rest counts as half written.
        for name in (_MANIFEST, _DRAFT, _PAYLOAD):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
