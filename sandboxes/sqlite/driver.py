"""The `sqlite` driver: a sandbox is a set of SQLite databases, run by Python's own SQLite library. Reads never fork."""

import asyncio
import hashlib
import itertools
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from sandboxes.driver import FrozenState
from sandboxes.errors import SpecError, StateGoneError
from sandboxes.linux.dir_lock import DirLock
from sandboxes.open_sandboxes import OpenSandboxes
from sandboxes.sources import SourceRules
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.sql.sqlite_authorizer import SETTINGS
from sandboxes.sql.sqlite_volatile import clock_can_be_set
from sandboxes.sqlite.database import SandboxDatabase
from sandboxes.sqlite.portable_states import StatePorter
from sandboxes.sqlite.sandbox import SqliteSandbox
from sandboxes.sqlite.sources import Sources
from sandboxes.sqlite.store import DatabaseState, SqliteStore
from sandboxes.workers.pool import WorkerPool

VERSION = 3
"""Part of every identity. Raise it when a change of the driver gives equal calls other results or other digests."""


class SqliteDriver:
    """The driver for SQLite databases. One instance owns its data directory; a lock in it keeps a second one out."""

    name = "sqlite"
    state_version = str(VERSION)

    def __init__(self, data_dir: Path, sources: SourceRules | None = None) -> None:
        self.data_dir = data_dir.resolve()
        self.store = SqliteStore(self.data_dir)
        self.worker_pool = WorkerPool("sqlite", self.data_dir)
        self._sources = Sources(self.store, self.worker_pool, sources or SourceRules())
        self._sandboxes = OpenSandboxes[SqliteSandbox]()
        self.porter = StatePorter(self.store, self._sandboxes.holding, frozenset(SETTINGS))
        self._ids = itertools.count(1)
        self._ownership = DirLock(self.data_dir)

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the data directory. The first call that needs a worker starts the workers."""
        self._ownership.acquire()
        await asyncio.to_thread(self.store.open)
        self._sources.open()

    async def trial(self) -> None:
        """Start a worker and end it, see `sandboxes.driver.TriedDriver`."""
        await self.worker_pool.trial()

    async def aclose(self) -> None:
        """Close all sandboxes, end all workers and release the data directory. Idempotent."""
        await self._sandboxes.close()
        await self.worker_pool.aclose()
        self._ownership.release()

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return the identity of a spec. Sources are read and copied once; later calls only check their times."""
        if spec.volatile == "frozen" and not clock_can_be_set():
            raise SpecError("this Python's SQLite hides its clock, so `volatile` cannot be frozen: use never or once.")
        digest = hashlib.blake2b(f"sqlite\0{VERSION}\0{sqlite3.sqlite_version}".encode(), digest_size=32)
        for name, database in sorted(spec.databases.items()):
            part = await self._sources.part(_source(database), confined=spec.confined)
            digest.update(f"\0{name}\0{part}".encode())
        return digest.hexdigest()

    async def start(self, spec: EnvironmentSpec) -> SqliteSandbox:
        """Start a sandbox at the root state, without a process or a file."""
        parts: dict[str, str] = {}
        with self._sandboxes.holding(parts.values()):
            for name, database in spec.databases.items():
                parts[name] = await self._sources.part(_source(database), confined=spec.confined)
            return self._adopt(spec, {name: self.store.root(part) for name, part in parts.items()})

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> SqliteSandbox:
        """Start a sandbox at a frozen state. As cheap as a start; the first change creates the fork."""
        states = {name: DatabaseState.from_json(value) for name, value in frozen.payload["databases"].items()}
        with self._sandboxes.holding(frozen.parts):
            for state in states.values():
                self.store.check(state)
            unread = [part for part in frozen.parts if part not in self.store.intact]
            if unread and not await asyncio.to_thread(lambda: all(map(self.store.is_whole, unread))):
                raise StateGoneError("a database state is damaged; replay its path instead")
            return self._adopt(spec, states)

    async def collect(self, keep: Iterable[str]) -> int:
        """Delete the states that neither `keep` names nor a sandbox needs; return the bytes of the rest."""
        # Read both sets before the first await: a sandbox may freeze and close meanwhile, and `keep` does not name the
        # state that it makes.
        existing, used_before, kept = self.store.all(), self._sandboxes.parts_in_use(), set(keep)
        unneeded = existing - kept - used_before
        if unneeded:
            # Idle readers may hold deleted files open, which would keep the disk full.
            await self.worker_pool.renew()
            await asyncio.to_thread(self.store.drop, unneeded - self._sandboxes.parts_in_use())
        return sum(self.store.size_bytes(part) for part in kept if self.store.has(part))

    def _adopt(self, spec: EnvironmentSpec, states: dict[str, DatabaseState]) -> SqliteSandbox:
        databases = {name: SandboxDatabase(self.store, self.worker_pool, spec, state) for name, state in states.items()}
        sandbox = SqliteSandbox(f"sqlite-{next(self._ids)}", databases)
        self._sandboxes.add(sandbox)
        return sandbox


def _source(database: Database) -> str | tuple[str, ...]:
    assert database.source is not None  # The spec requires it for this driver.
    return database.source
