"""Root states from what a spec names: a database file, a script or CSV files. Equal content makes one root state."""

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from sandboxes.errors import SandboxError, SpecError
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.files import file_digest, write_whole
from sandboxes.linux.plain_paths import open_plain
from sandboxes.sources import SourceRules
from sandboxes.sqlite.build import SCRIPT_S
from sandboxes.sqlite.file_clone import best_copy
from sandboxes.sqlite.messages import BuildDatabase, BuildFailed
from sandboxes.sqlite.store import SqliteStore
from sandboxes.workers.pool import WorkerLostError, WorkerPool, WorkerStuckError

_MAGIC = b"SQLite format 3\0"
_VERSIONS_AT, _WAL = 18, b"\2\2"
"""Offset of the file format's write and read versions, and the value that selects a write-ahead log."""
_ATTEMPTS = 3
"""How often a source that changes while it is read is read again."""
_TICK_NS = 20_000_000
"""Resolution of file times. A file that changed more recently may change again without a new time."""
_JOURNALS = ("-wal", "-journal")
"""Endings of the files in which SQLite keeps changes beside a database."""

SourceStamp = list[list[str | int]]
"""Path, size, times and inode of each file of a source."""


class Sources:
    """Maps each source to its root state, as long as the source's files do not change."""

    def __init__(self, store: SqliteStore, worker_pool: WorkerPool, rules: SourceRules) -> None:
        self._store, self._worker_pool, self._rules = store, worker_pool, rules
        self._file = store.folder / "sources.json"
        self._known: dict[str, tuple[SourceStamp, str]] = {}
        self._busy: dict[str, asyncio.Lock] = {}

    def open(self) -> None:
        """Read what earlier instances saved."""
        with contextlib.suppress(OSError, ValueError):
            self._known = {key: (stamp, part) for key, stamp, part in orjson.loads(self._file.read_bytes())}

    async def part(self, source: str | Sequence[str], *, confined: bool = False) -> str:
        """Return the name of a source's root state, and create the state if necessary."""
        paths = [source] if isinstance(source, str) else list(source)
        key = "\0".join(paths)
        async with self._busy.setdefault(key, asyncio.Lock()):
            try:
                for path in paths:
                    self._rules.real(path, confined=confined)
                files = [_SourceFile(path, self._rules, confined) for path in _files(paths)]
                known = self._known.get(key)
                if known is not None and known[0] == _stamp(files) and await self._is_whole(known[1]):
                    return known[1]
                stamp, part = await self._import(files)
            except OSError as error:
                raise SpecError(f"database source {error.filename}: {error.strerror}") from error
            self._known[key] = stamp, part
            await asyncio.to_thread(self._save)
            return part

    async def _is_whole(self, part: str) -> bool:
        return part in self._store.intact or await asyncio.to_thread(self._store.is_whole, part)

    async def _import(self, files: "list[_SourceFile]") -> tuple[SourceStamp, str]:
        folder = self._store.forks / f"source-{secrets.token_hex(8)}"
        folder.mkdir()
        try:
            for _ in range(_ATTEMPTS):
                # Optimistic: read, and start over if a file has changed meanwhile.
                stamp = await _settled(files)
                await self._build(files, folder / "db")
                if stamp == _stamp(files):
                    return stamp, await asyncio.to_thread(self._adopt, folder / "db")
                for path in folder.iterdir():
                    path.unlink()
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise SpecError(
            f"database source {files[0].path} changes while it is read. End what writes to it, then PUT again."
        )

    async def _build(self, files: "list[_SourceFile]", target: Path) -> None:
        first = files[0]
        if first.path.suffix == ".csv":
            for file in files:
                request = BuildDatabase("csv", str(target), file.path.stem)
                await self._run(file.path, request, await asyncio.to_thread(file.read))
        elif first.path.suffix == ".sql":
            data = await asyncio.to_thread(first.read)
            await self._run(first.path, BuildDatabase("script", str(target)), data)
        else:
            await asyncio.to_thread(first.copy_database, target)
            await self._run(first.path, BuildDatabase("file", str(target)), b"")

    async def _run(self, source: Path, request: BuildDatabase, data: bytes) -> None:
        """Build the database in a dedicated worker: a source may be anything, and must not harm this process."""
        worker = await self._worker_pool.dedicated()
        try:
            built = (await worker.ask(request, data, timeout_s=SCRIPT_S)).message
        except (WorkerLostError, WorkerStuckError) as error:
            raise SpecError(f"database source {source} cannot be read: {error}") from error
        finally:
            await worker.close()
        if isinstance(built, BuildFailed):
            raise SpecError(f"database source {source}: {built.error}. {_help(source)}")

    def _adopt(self, database: Path) -> str:
        _make_wal(database)
        digest = file_digest(database)
        # Named by content: equal sources share one root state.
        part = f"r-{digest}"
        if not self._store.is_whole(part):
            self._store.adopt(database, part, digest)
        return part

    def _save(self) -> None:
        write_whole(self._file, orjson.dumps([[key, *value] for key, value in self._known.items()]))


def _files(paths: list[str]) -> list[Path]:
    """Return the files that paths name. A directory stands for its CSV files, in the order of their names."""
    files = [Path(path) for path in paths]
    if len(files) == 1 and files[0].is_dir():
        files = sorted(files[0].glob("*.csv"))
        if not files:
            raise SpecError(f"database source {paths[0]} is a directory without a .csv file.")
    if not files:
        raise SpecError("a database needs a source: a database file, a .sql script, or CSV files.")
    if len(files) > 1 and any(file.suffix != ".csv" for file in files):
        raise SpecError(f"several files make a database only if all are .csv; these are {', '.join(map(str, files))}.")
    tables = [file.stem.casefold() for file in files]
    if len(set(tables)) < len(tables):
        raise SpecError("two CSV files have the same name, and would be one table. Rename one of them.")
    return files


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """A file that a spec names. What may be read is checked each time it is opened: the path may be a new link."""

    path: Path
    rules: SourceRules
    confined: bool

    def real(self) -> str:
        return self.rules.real(self.path, confined=self.confined)

    def read(self) -> bytes:
        with open_plain(self.real()) as path:
            return path.read_bytes()

    def copy_database(self, target: Path) -> None:
        """Copy a database and its journals. SQLite is not run on the original, because it would leave files there."""
        with open_plain(self.real()) as path:
            best_copy(path, target)
        for end in _JOURNALS:
            journal = replace(self, path=self.path.with_name(self.path.name + end))
            if journal.path.exists() and journal.path.stat().st_size:
                with open_plain(journal.real()) as path:
                    best_copy(path, target.with_name(target.name + end))


def _stamp(files: list[_SourceFile]) -> SourceStamp:
    """Return a value that changes whenever a file or a journal beside it does."""
    stamp: SourceStamp = []
    for file in files:
        # A source that was read before is checked again too, because its state must not outlive its permission.
        file.real()
        for path in (file.path, *(file.path.with_name(file.path.name + end) for end in _JOURNALS)):
            try:
                stat = path.stat()
            except FileNotFoundError:
                if path is file.path:
                    raise
                continue
            stamp.append([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns])
    return stamp


async def _settled(files: list[_SourceFile]) -> SourceStamp:
    """Return the stamp of files once their times are old enough that the next change gives other times."""
    while True:
        stamp = _stamp(files)
        age_ns = time.time_ns() - max(int(entry[4]) for entry in stamp)
        if not 0 <= age_ns < _TICK_NS:
            return stamp
        await asyncio.sleep(_TICK_NS / 1e9)


def _make_wal(database: Path) -> None:
    """Switch a database to a write-ahead log, which forks need. All other bytes stay the same."""
    with Opened(os.open(database, os.O_RDWR | os.O_CLOEXEC)) as fd:
        if os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            raise SandboxError(f"{database} was built as a database, but is not one")
        os.pwrite(fd, _WAL, _VERSIONS_AT)


def _help(source: Path) -> str:
    if source.suffix == ".sql":
        return "Correct the script; `sqlite3 new.db < script.sql` runs it as it is run here."
    if source.suffix == ".csv":
        return "Send CSV in UTF-8 whose first row names the columns."
    return "A source is a SQLite database file, a .sql script, or CSV files (by their ending)."
