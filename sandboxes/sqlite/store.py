"""States of SQLite databases on disk, and the forks that are made of them.

A state is a directory below `states`: `db`, a database file that never changes; `db-wal`, the changes since (none for a
root); `pages`, which pages differ from the root's; and, written last, `manifest.json`. A fork, below `forks`, is a
second copy of `db` with a log of its own, which a worker writes.
"""

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from sandboxes.errors import StateGoneError
from sandboxes.sqlite.counters import UNTOUCHED, Counters
from sandboxes.sqlite.file_clone import Method, best_copy, choose, hold, place
from sandboxes.sqlite.pages import Pages, last_versions, page_size_of, wal_bytes

COMPACT_BYTES = 8 << 20
"""A log longer than this, and than half of its database, becomes a database file of its own when it is kept."""


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """A state of one database: where its files are, and what else belongs to it.

    part: its directory below `states`. base: that of the state whose `db` it has. root: that of the root state. frames:
    length of its log. digest: of its content, relative to the root, in hex.
    """

    part: str
    base: str
    root: str
    frames: int
    digest: str
    counters: Counters = UNTOUCHED
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """All directories that it needs."""
        return tuple(dict.fromkeys((self.root, self.base, self.part)))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"counters": list(self.counters)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DatabaseState":
        return cls(**value | {"counters": Counters(*value["counters"])})


class SqliteStore:
    """Knows the directories. Everything here is fast but for large logs and, where there is no better way, copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states, self.forks, self.temporary = folder / "states", folder / "forks", folder / "tmp"
        self.method = Method.COPY
        self._manifests: dict[str, dict[str, Any]] = {}

    def open(self) -> None:
        """Get the directories ready, and remove what was half written or a killed instance's."""
        for folder in (self.forks, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.states, self.forks, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        for state in self.states.iterdir():
            if not (state / "manifest.json").exists():
                shutil.rmtree(state)
        self.method = choose(self.folder)

    # -- states ------------------------------------------------------------------------------------------------------

    def all(self) -> set[str]:
        return {path.name for path in self.states.iterdir() if not path.name.startswith("new-")}

    def path(self, part: str) -> Path:
        return self.states / part / "db"

    def has(self, part: str) -> bool:
        return (self.states / part / "manifest.json").exists()

    def size_bytes(self, part: str) -> int:
        return int(self._manifest(part)["size_bytes"])

    def drop(self, parts: set[str]) -> None:
        for part in parts:
            self._manifests.pop(part, None)
            # Without its manifest it is nothing, should the rest of it take long.
            (self.states / part / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(self.states / part, ignore_errors=True)

    def adopt(self, database: Path, part: str) -> None:
        """Make the database file a root state; it moves there."""
        folder = self._new()
        database.rename(folder / "db")
        self._finish(folder, part, frames=0, size_bytes=(folder / "db").stat().st_size)

    def root(self, part: str) -> DatabaseState:
        """Return the place of a root state."""
        pages = Pages(self.path(part))
        pages.close()
        return DatabaseState(part, part, part, 0, pages.digest().hex())

    def check(self, place: DatabaseState) -> None:
        """Look whether a state is all there and as it was when it was made.

        Raises:
            StateGone: it is not.
        """
        for part in place.parts:
            try:
                manifest = self._manifest(part)
                found = self.path(part).stat()
                log = wal_of(self.path(part))
                log_bytes = log.stat().st_size if manifest["frames"] else 0
            except (OSError, ValueError) as error:
                raise StateGoneError(f"database state {part} is gone ({error}); replay its path instead") from error
            if [found.st_size, found.st_mtime_ns, log_bytes] != manifest["stamp"]:
                raise StateGoneError(f"database state {part} was changed by somebody else; replay its path instead")

    def freeze(self, fork: "Fork", place: DatabaseState, pages: bytes) -> tuple[DatabaseState, int]:
        """Keep what fork holds, described by place, as a state; return where, and the bytes that it adds."""
        folder, part = self._new(), f"s-{secrets.token_hex(12)}"
        size = page_size_of(fork.header())
        length = wal_bytes(place.frames, size)
        (folder / "pages").write_bytes(pages)
        if length > max(COMPACT_BYTES, fork.path.stat().st_size // 2):
            best_copy(fork.path, folder / "db")
            _write_into(folder / "db", wal_of(fork.path), place.frames, size, int.from_bytes(pages[:4], "big"))
            kept, added = replace(place, part=part, base=part, frames=0), (folder / "db").stat().st_size
        else:
            self._place(fork.path, folder / "db")
            if length:
                best_copy(wal_of(fork.path), wal_of(folder / "db"), length=length)
            kept, added = replace(place, part=part), length
        added += len(pages)
        self._finish(folder, part, frames=kept.frames, size_bytes=added)
        return kept, added

    def _new(self) -> Path:
        folder = self.states / f"new-{secrets.token_hex(8)}"
        folder.mkdir()
        return folder

    def _finish(self, folder: Path, part: str, *, frames: int, size_bytes: int) -> None:
        database = (folder / "db").stat()
        log_bytes = wal_of(folder / "db").stat().st_size if frames else 0
        manifest = {
            "frames": frames,
            "size_bytes": size_bytes,
            "stamp": [database.st_size, database.st_mtime_ns, log_bytes],
        }
        # Manifest last: a state without one is half written, and is swept at the next start.
        (folder / "manifest.json").write_bytes(orjson.dumps(manifest))
        folder.rename(self.states / part)

    def _manifest(self, part: str) -> dict[str, Any]:
        manifest = self._manifests.get(part)
        if manifest is None:
            manifest = orjson.loads((self.states / part / "manifest.json").read_bytes())
            self._manifests[part] = manifest
        return manifest

    # -- forks -------------------------------------------------------------------------------------------------------

    def fork(self, place: DatabaseState) -> "Fork":
        """Make a fork at place. 0.2 ms by reflink or link.

        Raises:
            StateGone: the state is gone or damaged.
            OSError: no room.
        """
        self.check(place)
        folder = self.forks / secrets.token_hex(8)
        folder.mkdir()
        source = self.path(place.part)
        self._place(source, folder / "db")
        if place.frames:
            best_copy(wal_of(source), wal_of(folder / "db"))
        return Fork(folder / "db", hold(folder / "db"), self._pages(place), place)

    def _pages(self, place: DatabaseState) -> Path | None:
        saved = self.states / place.part / "pages"
        return saved if saved.exists() else None

    def _place(self, source: Path, target: Path) -> None:
        try:
            place(self.method, source, target)
        except OSError:
            # A file may have as many names as its file system allows (65,000 on ext4).
            best_copy(source, target)


@dataclass(frozen=True, slots=True)
class Fork:
    """A database that one sandbox writes. origin: the state that it was made of."""

    path: Path
    lock: int
    pages: Path | None
    origin: DatabaseState

    def header(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(100)

    def forget_index(self) -> None:
        """Remove the log's index after its worker has ended: it may tell of what is cut off then."""
        self.path.with_name("db-shm").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the fork's files; its worker has ended."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)


def wal_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


def _write_into(database: Path, log: Path, frames: int, page_size: int, pages: int) -> None:
    """Write the newest versions of the pages in a log into a copy of its database, page by page as they are."""
    wal, target = os.open(log, os.O_RDONLY | os.O_CLOEXEC), os.open(database, os.O_RDWR | os.O_CLOEXEC)
    try:
        for page, at in last_versions(wal, 0, frames, page_size).items():
            os.pwrite(target, os.pread(wal, page_size, at), (page - 1) * page_size)
        os.ftruncate(target, pages * page_size)
    finally:
        os.close(wal)
        os.close(target)
