"""States of SQLite databases on disk, and the forks made from them.

A state is a directory below `states` with these files:

- `db`: a database file that never changes.
- `db-wal`: a log with the changes since; a root state has none.
- `pages`: which pages differ from the root's (`sandboxes.sqlite.pages`).
- `manifest.json`: sizes, times and digests of the others (`sandboxes.workers.parts`).


A fork is a directory below `forks`: a second copy of `db`, and a log of its own, which one worker writes.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import override

from sandboxes.errors import StateGoneError
from sandboxes.linux.files import file_digest, sync_path
from sandboxes.sqlite.counters import UNTOUCHED, RowCounters
from sandboxes.sqlite.file_clone import best_copy, clone, hold
from sandboxes.sqlite.pages import Pages, last_versions, page_size_of, wal_bytes
from sandboxes.workers.parts import MANIFEST, NEW, PartStore

COMPACT_BYTES = 8 << 20
"""A longer log is written into a database file of its own when its state is frozen, if it exceeds half of its database.
Every fork of a state copies its log, so long logs make forks slow; a new file costs disk space once."""


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """A state of one database: its files, and what a new connection needs besides."""

    part: str  # Its directory below `states`; while it is not frozen, that of the state it was forked from.
    base: str  # Directory of the state that it shares its `db` with.
    root: str  # Directory of the root state.
    frames: int  # Length of its log.
    digest: str  # Of its content relative to the root, in hexadecimal.
    counters: RowCounters = UNTOUCHED  # The row counters that the rollout's statements left in its connection.
    settings: dict[str, int] = field(default_factory=dict)  # Pragmas that differ from their defaults.

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all directories that the state needs."""
        return tuple(dict.fromkeys((self.root, self.base, self.part)))

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON members."""
        return {name: getattr(self, name) for name in self.__slots__} | {"counters": list(self.counters)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DatabaseState":
        """Read what `to_json` returned."""
        return cls(**value | {"counters": RowCounters(*value["counters"])})


class SqliteStore(PartStore):
    """The directories of one driver's states and forks, and of SQLite's temporary files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "states", "database state")
        self.folder, self.forks, self.temporary = folder, folder / "forks", folder / "tmp"

    @override
    def open(self) -> None:
        # No fork survives its driver: its worker, and the session in it, are gone.
        for folder in (self.forks, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        super().open()

    # -- states ------------------------------------------------------------------------------------------------------

    def path(self, part: str) -> Path:
        """Return the database file of a state."""
        return self.parts / part / "db"

    def size_bytes(self, part: str) -> int:
        """Return the bytes on disk that the state added when it was frozen."""
        return int(self.manifest(part)["size_bytes"])

    def adopt(self, database: Path, part: str, digest: str) -> None:
        """Move a database file, whose digest is known, into a new root state."""
        folder = self._new()
        database.rename(folder / "db")
        # A root state is named by its content and trusted after a loss of power: its bytes come before its name.
        sync_path(folder / "db")
        size_bytes = (folder / "db").stat().st_size
        self._finish(folder, part, frames=0, size_bytes=size_bytes, database=digest, durable=True)

    def root(self, part: str) -> DatabaseState:
        """Return a root state by name."""
        pages = Pages(self.path(part))
        pages.close()
        return DatabaseState(part, part, part, 0, pages.digest().hex())

    def check(self, state: DatabaseState) -> None:
        """Raise StateGoneError unless all files of a state exist and are unchanged."""
        for part in state.parts:
            try:
                manifest = self.manifest(part)
                stat = self.path(part).stat()
                log = wal_of(self.path(part))
                log_bytes = log.stat().st_size if manifest["frames"] else 0
            except (OSError, ValueError) as error:
                raise StateGoneError(f"database state {part} is gone ({error}); replay its path instead") from error
            if [stat.st_size, stat.st_mtime_ns, log_bytes] != manifest["stamp"]:
                raise StateGoneError(f"database state {part} was changed from outside; replay its path instead")

    def freeze(self, fork: "Fork", state: DatabaseState, pages: bytes) -> tuple[DatabaseState, int]:
        """Save a fork as a state, and return it with the bytes that it adds to the disk."""
        # The fork's worker must be between transactions. `pages` is the result of `Pages.save` for the content.
        folder, part = self._new(), f"s-{secrets.token_hex(12)}"
        size = page_size_of(fork.header())
        length = wal_bytes(state.frames, size)
        (folder / "pages").write_bytes(pages)
        if length > max(COMPACT_BYTES, fork.path.stat().st_size // 2):
            # Compact: the log becomes part of a database file of its own.
            best_copy(fork.path, folder / "db")
            _write_into(folder / "db", wal_of(fork.path), state.frames, size, int.from_bytes(pages[:4], "big"))
            kept, added = replace(state, part=part, base=part, frames=0), (folder / "db").stat().st_size
            database = file_digest(folder / "db")
        else:
            # Share the database file, and copy the log up to the state's last frame.
            clone(fork.path, folder / "db")
            if length:
                best_copy(wal_of(fork.path), wal_of(folder / "db"), length=length)
            kept, added = replace(state, part=part), length
            database = self.manifest(fork.origin.part)["digests"]["db"]
        added += len(pages)
        self._finish(folder, part, frames=kept.frames, size_bytes=added, database=database)
        return kept, added

    def saved_pages(self, part: str) -> bytes | None:
        """Return what `Pages.save` returned for a state; None for a root state."""
        saved = self.parts / part / "pages"
        return saved.read_bytes() if saved.exists() else None

    def frames(self, part: str) -> int:
        """Return the length of a state's log in frames."""
        return int(self.manifest(part)["frames"])

    def adopt_over(self, root: str, build: Callable[[Path], tuple[int, bytes]]) -> str:
        """Add a state that shares its database file with a root state, and return its name."""
        # `build` writes the log beside the database file that it is given; it returns the log's length in frames, and
        # what `Pages.save` returns for the state. If it fails, nothing stays.
        folder, part = self._new(), f"s-{secrets.token_hex(12)}"
        try:
            clone(self.path(root), folder / "db")
            frames, pages = build(folder / "db")
            (folder / "pages").write_bytes(pages)
            added = len(pages) + (wal_of(folder / "db").stat().st_size if frames else 0)
            self._finish(folder, part, frames=frames, size_bytes=added, database=self.manifest(root)["digests"]["db"])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return part

    def _new(self) -> Path:
        folder = self.parts / f"{NEW}{secrets.token_hex(8)}"
        folder.mkdir()
        return folder

    def _finish(
        self, folder: Path, part: str, *, frames: int, size_bytes: int, database: str, durable: bool = False
    ) -> None:
        """Write a state's manifest, and rename its folder; a durable state must outlive a loss of power."""
        status = (folder / "db").stat()
        log_bytes = wal_of(folder / "db").stat().st_size if frames else 0
        others = [path for path in (wal_of(folder / "db"), folder / "pages") if path.exists()]
        manifest = {
            "frames": frames,
            "size_bytes": size_bytes,
            "stamp": [status.st_size, status.st_mtime_ns, log_bytes],
            "digests": {"db": database} | {path.name: file_digest(path) for path in others},
        }
        (folder / MANIFEST).write_bytes(orjson.dumps(manifest))
        if durable:
            sync_path(folder / MANIFEST)
            sync_path(folder)
        folder.rename(self.parts / part)
        self.intact.add(part)

    # -- forks -------------------------------------------------------------------------------------------------------

    def fork(self, state: DatabaseState) -> "Fork":
        """Create a fork of a state; StateGoneError if the state is gone or damaged."""
        self.check(state)
        folder = self.forks / secrets.token_hex(8)
        folder.mkdir()
        source = self.path(state.part)
        clone(source, folder / "db")
        if state.frames:
            # The fork appends to its log, so it needs a log of its own.
            best_copy(wal_of(source), wal_of(folder / "db"))
        pages = self.parts / state.part / "pages"
        return Fork(folder / "db", hold(folder / "db"), pages if pages.exists() else None, state)


@dataclass(frozen=True, slots=True)
class Fork:
    """A database that one sandbox writes."""

    path: Path  # The log lies beside it.
    lock: int  # Descriptor that keeps the log out of a linked database file (see `file_clone.hold`).
    pages: Path | None  # The origin's saved pages; None if the origin is a root state.
    origin: DatabaseState

    def header(self) -> bytes:
        """Return the first 100 bytes of the database."""
        with self.path.open("rb") as file:
            return file.read(100)

    def forget_index(self) -> None:
        """Remove the log's index once the worker has ended. The index may list frames that a rollback cuts off."""
        self.path.with_name("db-shm").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the fork's files once its worker has ended."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)


def wal_of(database: Path) -> Path:
    """Return the path of a database's log."""
    return database.with_name(database.name + "-wal")


def _write_into(database: Path, log: Path, frames: int, page_size: int, pages: int) -> None:
    """Write the newest version of each page in a log into a copy of its database (a checkpoint without SQLite)."""
    wal, target = os.open(log, os.O_RDONLY | os.O_CLOEXEC), os.open(database, os.O_RDWR | os.O_CLOEXEC)
    try:
        for page, offset in last_versions(wal, 0, frames, page_size).items():
            os.pwrite(target, os.pread(wal, page_size, offset), (page - 1) * page_size)
        os.ftruncate(target, pages * page_size)
    finally:
        os.close(wal)
        os.close(target)
