"""The `sqlite` driver: databases as sandboxes, embedded, with the Python's own SQLite. Reads never fork."""

import asyncio
import hashlib
import itertools
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sandboxes.driver import FrozenState
from sandboxes.errors import SpecError
from sandboxes.linux.dir_lock import Ownership
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.sql.sqlite_volatile import clock_can_be_set
from sandboxes.sqlite.database import SandboxDatabase
from sandboxes.sqlite.sandbox import SqliteSandbox
from sandboxes.sqlite.sources import Sources
from sandboxes.sqlite.store import DatabaseState, SqliteStore
from sandboxes.workers.pool import WorkerPool

VERSION = 1
"""Part of every identity: raise it when equal calls would give other answers or other digests than before."""


class SqliteDriver:
    """See `sandboxes.driver.Driver`. One instance owns its data directory; a lock in it keeps a second one out."""

    name = "sqlite"

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.resolve()
        self.store = SqliteStore(self.data_dir)
        self.worker_pool = WorkerPool("sqlite", self.data_dir)
        self._sources = Sources(self.store, self.worker_pool)
        self._sandboxes: set[SqliteSandbox] = set()
        self._ids = itertools.count(1)
        self._held: list[Iterable[str]] = []
        self._ownership = Ownership(self.data_dir)

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Driver.open`. Workers are started by the first call that needs one.

        Raises:
            SandboxError: another process uses this data directory.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._ownership.take()
        self.data_dir.chmod(0o700)
        await asyncio.to_thread(self.store.open)
        self._sources.open()

    async def aclose(self) -> None:
        """See `Driver.aclose`. Idempotent."""
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        await self.worker_pool.aclose()
        self._ownership.release()

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """See `Driver.identity`. The first time, what spec names is read and copied; later, some stats."""
        if spec.volatile == "frozen" and not clock_can_be_set():
            raise SpecError("this Python's SQLite hides its clock, so `volatile` cannot be frozen: use never or once.")
        digest = hashlib.blake2b(f"sqlite\0{VERSION}\0{sqlite3.sqlite_version}".encode(), digest_size=32)
        for name, database in sorted(spec.databases.items()):
            part = await self._sources.part(_source(database))
            digest.update(f"\0{name}\0{part}".encode())
        return digest.hexdigest()

    async def start(self, spec: EnvironmentSpec) -> SqliteSandbox:
        """See `Driver.start`. 0.3 ms: no process and no file."""
        parts: dict[str, str] = {}
        with self._holding(parts.values()):
            for name, database in spec.databases.items():
                parts[name] = await self._sources.part(_source(database))
            return self._adopt(spec, {name: self.store.root(part) for name, part in parts.items()})

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> SqliteSandbox:
        """See `Driver.restore`. As cheap as a start; its first change pays for its fork."""
        places = {name: DatabaseState.from_json(told) for name, told in frozen.payload["databases"].items()}
        with self._holding(frozen.parts):
            for place in places.values():
                self.store.check(place)
            return self._adopt(spec, places)

    async def collect(self, keep: Iterable[str]) -> int:
        """See `Driver.collect`."""
        # What there was, and what was in use, before the first await: a sandbox that freezes meanwhile and ends has
        # made a state that keep does not know of.
        there, before, kept = self.store.all(), self._in_use(), set(keep)
        unneeded = there - kept - before
        if unneeded:
            # They may hold open what is deleted, and then the disk stays full.
            await self.worker_pool.renew()
            await asyncio.to_thread(self.store.drop, unneeded - self._in_use())
        return sum(self.store.size_bytes(part) for part in kept if self.store.has(part))

    def _in_use(self) -> set[str]:
        return {part for user in (*(s.parts for s in self._sandboxes), *self._held) for part in user}

    @contextmanager
    def _holding(self, parts: Iterable[str]) -> Iterator[None]:
        self._held.append(parts)
        try:
            yield
        finally:
            self._held.remove(parts)

    def _adopt(self, spec: EnvironmentSpec, places: dict[str, DatabaseState]) -> SqliteSandbox:
        databases = {name: SandboxDatabase(self.store, self.worker_pool, spec, place) for name, place in places.items()}
        sandbox = SqliteSandbox(f"sqlite-{next(self._ids)}", databases, self._sandboxes.discard)
        self._sandboxes.add(sandbox)
        return sandbox


def _source(database: Database) -> str | tuple[str, ...]:
    assert database.source is not None  # the spec says so
    return database.source
