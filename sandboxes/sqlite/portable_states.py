"""Export and import of frozen states of SQLite databases; see `sandboxes.portability`.

A state travels as the pages in which it differs from its root state. The root state itself stays at home: it follows
from the source that the spec names, and its name is a digest of its content, which is part of the tree's root key.

    4 bytes `FPS1`, page size, number of pages, number of entries; then for each entry, by rising page number, the
    number and the page. All numbers are big-endian, of 4 bytes.

Such a file is hostile. It becomes a write-ahead log over the root's database file, and the digest of its pages must be
the one that the state claims. What the pages mean is read by workers only, as with a database that an agent broke.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from sandboxes.driver import FrozenState
from sandboxes.open_sandboxes import Holding
from sandboxes.portability import NotPortableError
from sandboxes.sqlite.counters import RowCounters
from sandboxes.sqlite.database import combined_digest, visible_digest
from sandboxes.sqlite.pages import Pages, changed_pages, last_versions, page_size_of
from sandboxes.sqlite.store import DatabaseState, SqliteStore, wal_of

_MAGIC = b"FPS1"
_HEAD, _NUMBER = struct.Struct(">4sIII"), struct.Struct(">I")
_PAGE_SIZES = frozenset(1 << bits for bits in range(9, 17))
"""Page sizes of SQLite (fileformat2.html, 1.3.2)."""
_WAL_MAGIC, _WAL_VERSION = 0x377F0682, 3007000
"""Start of a log whose checksums are made of little-endian words (fileformat2.html, 4.1)."""
_LOG_HEAD, _SUMS = struct.Struct(">IIII"), struct.Struct(">II")
_SALTS = b"forkpt\0\0"
"""Salts of the logs written here. Frames of an older log in the same file would have others, and there are none."""
_MAX_ROWS = 1 << 40
"""Largest count of changed rows that is believed; no rollout changes as many."""
_FIELDS = {"part", "base", "root", "frames", "digest", "counters", "settings"}


class StatePorter:
    """A `Porter` of SQLite states."""

    def __init__(self, store: SqliteStore, holding: Holding, settings: frozenset[str]) -> None:
        """Work on the states of a store, which may name these pragmas; `holding` keeps states from being collected."""
        self._store, self._holding, self._settings = store, holding, settings

    def carries(self, kind: str) -> bool:
        """Return whether states of a kind are plain data; all are."""
        return kind == "files"

    def pack(self, part: str) -> Iterator[bytes]:
        """Yield the pages in which a state differs from its root; nothing for a root state."""
        return _packed(self._store, part)

    @contextmanager
    def unpacking(self) -> "Iterator[StateUnpacking]":
        """Import parts and states; nothing collects them before the end of the context."""
        with contextlib.ExitStack() as held:
            folder = self._store.temporary / f"import-{secrets.token_hex(8)}"
            folder.mkdir()
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            yield StateUnpacking(
                self._store, folder, lambda part: held.enter_context(self._holding((part,))), self._settings
            )


class StateUnpacking:
    """One import. Packed pages wait in a folder until a state says which root they belong to."""

    def __init__(
        self, store: SqliteStore, folder: Path, hold: Callable[[str], object], settings: frozenset[str]
    ) -> None:
        self._store, self._folder, self._hold, self._settings = store, folder, hold, settings
        self._waiting: dict[str, tuple[Path, str]] = {}
        self._made: dict[tuple[str, str], str] = {}

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """Keep a part until its state comes."""
        path = self._folder / str(len(self._waiting))
        with path.open("xb") as file:
            while piece := data.read(1 << 20):
                file.write(piece)
        self._waiting[name] = path, sha256

    def state(self, frozen: FrozenState) -> FrozenState:
        """Write the databases of a state and return it with the names that they have here."""
        given = frozen.payload.get("databases")
        if set(frozen.payload) != {"databases"} or not isinstance(given, dict) or not given:
            raise NotPortableError("its payload does not have the members of a SQLite state")
        states = {str(name): self._database(value, frozen.parts) for name, value in given.items()}
        digest = combined_digest({name: visible_digest(state) for name, state in states.items()})
        if frozen.state is None or (frozen.state.exact, frozen.state.content) != (digest, digest):
            raise NotPortableError("its digest is another")
        parts = tuple(sorted({part for state in states.values() for part in state.parts}))
        size = sum(self._store.size_bytes(state.part) for state in states.values() if state.part != state.root)
        payload = {"databases": {name: state.to_json() for name, state in states.items()}}
        return replace(frozen, payload=payload, parts=parts, size_bytes=size)

    def _database(self, value: Any, parts: tuple[str, ...]) -> DatabaseState:
        if not isinstance(value, dict) or set(value) != _FIELDS or not self._is_plain(value):
            raise NotPortableError("its payload does not have the members of a SQLite state")
        part, root = value["part"], value["root"]
        if part not in parts or part not in self._waiting:
            raise NotPortableError(f"its part {part} was not imported")
        # A root state is named by its content, so knowing its name is knowing what is in it.
        if not root.startswith("r-") or not self._store.has(root):
            raise NotPortableError(f"its root state {root} is not here")
        self._hold(root)
        if part != root:
            if (part, root) not in self._made:
                self._made[part, root] = self._write(part, root)
            part = self._made[part, root]
        frames, digest = self._store.frames(part), self._digest(root, part)
        counters = RowCounters(*value["counters"])
        return DatabaseState(part, part, root, frames, digest, counters, value["settings"])

    def _digest(self, root: str, part: str) -> str:
        pages = Pages(self._store.path(root), self._store.saved_pages(part) or b"")
        try:
            return pages.digest().hex()
        finally:
            pages.close()

    def _is_plain(self, value: dict[str, Any]) -> bool:
        counters, settings = value["counters"], value["settings"]
        return (
            all(isinstance(value[name], str) for name in ("part", "base", "root"))
            and isinstance(counters, list)
            and len(counters) == len(RowCounters._fields)
            and all(type(number) is int and abs(number) < 1 << 63 for number in counters)
            and 0 <= counters[0] < _MAX_ROWS
            and 0 <= counters[2] < _MAX_ROWS
            and isinstance(settings, dict)
            and settings.keys() <= self._settings
            and all(type(number) is int and abs(number) < 1 << 31 for number in settings.values())
        )

    def _write(self, part: str, root: str) -> str:
        path, sha256 = self._waiting[part]

        def build(database: Path) -> tuple[int, bytes]:
            with path.open("rb") as packed:
                return _unpacked(packed, self._store.path(root), database)

        name = self._store.adopt_over(root, build)
        self._hold(name)
        # Packed again it must give the same bytes: then nothing was misread, and no page was superfluous.
        digest = hashlib.sha256()
        for piece in _packed(self._store, name):
            digest.update(piece)
        if digest.hexdigest() != sha256:
            raise NotPortableError("written here, its digest is another: it is not packed as this version does it")
        return name


def _packed(store: SqliteStore, part: str) -> Iterator[bytes]:
    saved = store.saved_pages(part)
    if saved is None:
        return
    count, changed = changed_pages(saved)
    database = store.path(part)
    frames = store.frames(part)
    with database.open("rb") as file, contextlib.ExitStack() as opened:
        size = page_size_of(os.pread(file.fileno(), 100, 0))
        log = opened.enter_context(wal_of(database).open("rb")) if frames else None
        offsets = last_versions(log.fileno(), 0, frames, size) if log is not None else {}
        yield _HEAD.pack(_MAGIC, size, count, len(changed))
        for page in sorted(changed):
            source, offset = (log, offsets[page]) if log and page in offsets else (file, (page - 1) * size)
            data = os.pread(source.fileno(), size, offset)
            if len(data) < size:
                raise OSError(f"{database} ends before page {page}")
            yield _NUMBER.pack(page) + data


def _unpacked(packed: BinaryIO, root: Path, database: Path) -> tuple[int, bytes]:
    head = packed.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise NotPortableError("it is truncated")
    magic, size, count, entries = _HEAD.unpack(head)
    pages = Pages(root)
    try:
        if magic != _MAGIC or size not in _PAGE_SIZES or size != pages.page_size or not 0 < count < 1 << 32:
            raise NotPortableError("it has no pages of its root state")
        with wal_of(database).open("xb+") as log:
            if entries or count == pages.count:
                frames = _write_log(log, _entries(packed, size, count, entries), entries, size, count)
            else:
                # A database that only became shorter has no page that says so: its first one is written again.
                with root.open("rb") as file:
                    frames = _write_log(log, [(1, file.read(size))], 1, size, count)
            if packed.read(1):
                raise NotPortableError("it continues after its last page")
            log.flush()
            pages.take(log.fileno(), 0, frames, count)
        if not frames:
            wal_of(database).unlink()
        return frames, pages.save()
    finally:
        pages.close()


def _entries(packed: BinaryIO, size: int, count: int, entries: int) -> Iterator[tuple[int, bytes]]:
    last = 0
    for _ in range(entries):
        entry = packed.read(_NUMBER.size + size)
        if len(entry) < _NUMBER.size + size:
            raise NotPortableError("it is truncated")
        (page,) = _NUMBER.unpack_from(entry)
        if not last < page <= count:
            raise NotPortableError(f"page {page} is out of order, or behind the end")
        last = page
        yield page, entry[_NUMBER.size :]


def _write_log(log: BinaryIO, pages: Iterable[tuple[int, bytes]], frames: int, size: int, count: int) -> int:
    """Write a log of one transaction with these pages (fileformat2.html, 4.1); return its number of frames."""
    head = _LOG_HEAD.pack(_WAL_MAGIC, _WAL_VERSION, size, 0) + _SALTS
    sums = _checksum(head, (0, 0))
    log.write(head + _SUMS.pack(*sums))
    for number, (page, data) in enumerate(pages, 1):
        # The last frame of a transaction says how many pages the database has.
        start = _SUMS.pack(page, count if number == frames else 0)
        sums = _checksum(start + data, sums)
        log.write(start + _SALTS + _SUMS.pack(*sums) + data)
    return frames


def _checksum(data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    for one, other in struct.iter_unpack("<II", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
