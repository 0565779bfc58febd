"""Snapshots on disk: one directory each, its manifest last."""

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from sandboxes.driver import FrozenState
from sandboxes.effects import StateDigest
from snapshots.snapshot import Snapshot

_MANIFEST, _DRAFT, _PAYLOAD = "manifest.json", "draft", "payload.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SnapshotStore:
    """All snapshots of one data directory. What a snapshot holds is read from disk when it is restored."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._snapshots: dict[str, Snapshot] = {}

    def open(self) -> int:
        """Read back what is there; sweep what is half written or damaged, and what a reboot made doubtful.

        Return how many stay.

        Layers are written without waiting for the disk, so after the machine itself went down they cannot be trusted:
        a lost snapshot costs time, a damaged one a wrong answer.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        boot, mark = _boot_id(), self._directory / "boot-id"
        rebooted = mark.exists() and mark.read_text() != boot
        for entry in sorted(self._directory.iterdir()):
            if entry == mark:
                continue
            snapshot = None if rebooted else _read(entry)
            if snapshot is None:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                self._snapshots[snapshot.id] = snapshot
        mark.write_text(boot)
        return len(self._snapshots)

    def save(self, frozen: FrozenState, *, tree: int, node: int, cost_s: float) -> Snapshot:
        """Write a frozen state. Blocking: some hundred microseconds.

        Raises:
            OSError: the disk is full; nothing is left behind that a restart would take for a snapshot.
        """
        name = uuid.uuid4().hex
        state = frozen.state
        manifest = {
            "tree": tree,
            "node": node,
            "driver": frozen.driver,
            "kind": frozen.kind,
            "parts": list(frozen.parts),
            "size_bytes": frozen.size_bytes,
            "cost_s": cost_s,
            "created_at": time.time(),
            "state": None if state is None else [state.exact.hex(), state.content.hex()],
        }
        directory = self._directory / name
        directory.mkdir()
        try:
            (directory / _PAYLOAD).write_bytes(orjson.dumps(frozen.payload))
            draft = directory / _DRAFT
            draft.write_bytes(orjson.dumps(manifest))
            # Manifest last: a snapshot without one is half written, and is swept at start.
            draft.rename(directory / _MANIFEST)
        except BaseException:
            _remove(directory)
            raise
        self._snapshots[name] = _snapshot(name, manifest)
        return self._snapshots[name]

    def load(self, snapshot: Snapshot) -> FrozenState:
        """Read what a driver needs to restore snapshot. Blocking.

        Raises:
            FileNotFoundError, ValueError: it is gone or damaged.
            OSError: the machine cannot read it now.
        """
        directory = self._directory / snapshot.id
        manifest = orjson.loads((directory / _MANIFEST).read_bytes())
        state = manifest["state"] and StateDigest(*(bytes.fromhex(digest) for digest in manifest["state"]))
        payload: dict[str, Any] = orjson.loads((directory / _PAYLOAD).read_bytes())
        return FrozenState(
            snapshot.driver, snapshot.kind, payload, snapshot.size_bytes, state or None, tuple(manifest["parts"])
        )

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. What it held is freed by the driver's next `collect`."""
        if self._snapshots.pop(snapshot.id, None) is not None:
            _remove(self._directory / snapshot.id)

    def get(self, name: str | None) -> Snapshot | None:
        return None if name is None else self._snapshots.get(name)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._snapshots.values()))

    def __len__(self) -> int:
        return len(self._snapshots)


def _read(directory: Path) -> Snapshot | None:
    """Return the snapshot in directory; None where it is half written or damaged."""
    try:
        return _snapshot(directory.name, orjson.loads((directory / _MANIFEST).read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _snapshot(name: str, manifest: dict[str, Any]) -> Snapshot:
    fields = ("tree", "node", "driver", "kind", "size_bytes", "cost_s", "created_at")
    return Snapshot(name, parts=tuple(manifest["parts"]), **{field: manifest[field] for field in fields})


def _remove(directory: Path) -> None:
    """Remove a snapshot's directory, also where no descriptor is free to list it; what stays is swept at start."""
    with contextlib.suppress(OSError):
        for name in (_MANIFEST, _DRAFT, _PAYLOAD):
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
