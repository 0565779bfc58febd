"""Backups of the store while a proxy runs, and data directories that are made of a backup.

A backup is the store as it was at one moment, with the journal's steps, in one SQLite file. Snapshots can be added
(`proxy.transfer.backup`); without them, replays rebuild their states.

A backup is older than what its agents have seen. A rollout that ran would continue at an earlier position and get wrong
answers, so a restore marks every such rollout as lost.
"""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from proxy.storage.data_dir import STORE, owning
from proxy.storage.database import StoreDatabase, read_only
from proxy.storage.errors import DamagedError, StoreError
from proxy.storage.journal import MARK
from proxy.storage.migrations import copy_database
from proxy.storage.schema import count_damaged
from proxy.storage.store import Store
from sandboxes.linux.files import sync_path

LOST = "the data directory was restored from a backup, which may be older than what the agent has seen"
"""Why rollouts that ran when a backup was made are refused."""
STATES = "restored-states"
"""Directory of a restored data directory for the states that its first start adopts."""
_DRAFT = "restored.sqlite"
_DRAFT_STATES = "restored.states"
DRAFTS = "restored.workers"
"""Directory for the parts of a backup while they are restored."""
_OURS = frozenset({"lock", "lost+found"})
"""What an empty data directory may contain: our lock, and what some file systems put into their root."""


@dataclass(frozen=True, slots=True)
class RestoredBackup:
    """What a backup brought into a data directory."""

    tasks: int  # Numbers of tasks, recorded calls and so on.
    calls: int
    lost_rollouts: int  # Rollouts that ran when the backup was made; they are refused from now on.
    snapshots: int = 0


class Unpacker(Protocol):
    """A backup that is more than the store's file."""

    def unpack(self, store: Path, states: Path) -> None:
        """Write the store to a file, and what else there is below a new directory. Blocking."""
        ...

    def check(self, database: StoreDatabase, states: Path) -> int:
        """Check what was written to the directory against the store; return the number of snapshots. Blocking."""
        ...


def back_up(database: StoreDatabase, target: Path) -> None:
    """Write a durable copy of the store, whole or not at all (StoreError). Blocking. Fold the journal before."""
    try:
        with closing(database.open_reader()) as source:
            copy_database(source, target)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the backup could not be written: {error}. Free disk space, and try again.") from error


def known_nodes(copy: Path, nodes: Iterable[int]) -> frozenset[int]:
    """Return those of some nodes that a backup has, without states that were set aside. Blocking."""
    query = "SELECT id FROM nodes WHERE id = ? AND diverged = ''"
    with closing(sqlite3.connect(read_only(copy), uri=True)) as connection:
        return frozenset(node for node in nodes if connection.execute(query, (node,)).fetchone())


def restore(file: Path, data: Path, unpacker: Unpacker | None = None) -> RestoredBackup:
    """Make a data directory, which must be empty, of a backup that is checked first. Blocking, minutes for gigabytes.

    An unpacker reads the file; None for a file that is the store alone. Raises StoreError if the directory cannot be
    used, or the file is no backup, damaged, or of a newer version.
    """
    draft, states = data / _DRAFT, data / _DRAFT_STATES
    with owning_empty(data):
        try:
            if unpacker is None:
                _copy(file, draft)
            else:
                unpacker.unpack(draft, states)
            restored = _check(file, draft, None if unpacker is None else partial(unpacker.check, states=states))
            if unpacker is not None:
                for path in (*states.iterdir(), states):
                    sync_path(path)
                states.rename(data / STATES)
            draft.rename(data / STORE)
            sync_path(data)
        except OSError as error:
            raise StoreError(f"{file} could not be restored: {error}. Free disk space, or check the file.") from error
    return restored


@contextmanager
def owning_empty(data: Path) -> Iterator[None]:
    """Own an empty data directory, and remove drafts in it afterwards. Raises StoreError if it is in use."""
    with owning(data):
        _remove_drafts(data)
        if present := sorted(entry.name for entry in data.iterdir() if entry.name not in _OURS):
            raise StoreError(
                f"{data} is not empty (it has {present[0]}). A restore needs an empty directory: choose another one "
                "with --data, or move this one away."
            )
        try:
            yield
        finally:
            _remove_drafts(data)


def _copy(file: Path, draft: Path) -> None:
    try:
        with closing(sqlite3.connect(read_only(file), uri=True)) as source:
            copy_database(source, draft)
    except sqlite3.Error as error:
        raise StoreError(f"{file} is not a backup of Forkpoint: {error}.") from error


def _check(file: Path, draft: Path, count_states: Callable[[StoreDatabase], int] | None) -> RestoredBackup:
    """Check all rows of a copied backup, and mark its running rollouts as lost."""
    try:
        store = Store(draft, sync="FULL")
    except StoreError as error:
        raise StoreError(f"{file} cannot be restored: {error.__cause__ or error}.") from error
    with closing(store):
        database = store.database
        damaged = count_damaged(database.tables)
        if damaged:
            table, count = next(iter(damaged.items()))
            raise StoreError(
                f"{file} is damaged: {count} rows of {table} are not what was written. Use another backup."
            )
        try:
            for (blob,) in database.rows("SELECT id FROM blobs", ()):
                store.blobs.read(blob)
        except DamagedError as error:
            raise StoreError(f"{file} is damaged: {error} Use another backup.") from error
        snapshots = 0 if count_states is None else count_states(database)
        lost = store.rollouts.lose(None, LOST)
        with database.transaction(durable=True) as execute:
            # The journal of the proxy that wrote the backup stayed where it was.
            execute("DELETE FROM meta WHERE name = ?", (MARK,))
        counts = database.row("SELECT (SELECT COUNT(*) FROM tasks), (SELECT COUNT(*) FROM records)", ())
        assert counts is not None
    sync_path(draft)
    return RestoredBackup(counts[0], counts[1], lost, snapshots)


def _remove_drafts(data: Path) -> None:
    with contextlib.suppress(OSError):
        for path in data.glob(f"{_DRAFT}*"):
            path.unlink()
        for name in (_DRAFT_STATES, DRAFTS):
            if (data / name).exists():
                shutil.rmtree(data / name)
