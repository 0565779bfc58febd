"""Clones of frozen databases on a server: for reading, for writing, and ahead of use.

Theory of operation. `CREATE DATABASE … TEMPLATE` copies only a database that has no sessions. So a state is a
*template*: a database that accepts no connections and therefore can be cloned at any moment. There are three kinds of
clone:

1. One *reader* for each template, created at the first read. All sandboxes at that state read there, in read-only
   transactions that are rolled back.
2. A *private clone* for each sandbox that writes. It belongs to that sandbox and its worker until the sandbox closes.
3. *Spares*: private clones that wait for a sandbox. Each has a connected worker that has already read the catalogs,
   which takes longer than a first write.
"""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

import structlog

from sandboxes.errors import SandboxError, SpecError
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.messages import OpenDatabase
from sandboxes.postgres.sequence_use import SequenceUse
from sandboxes.postgres.server import DatabaseSettings, PostgresServer
from sandboxes.task_owner import TaskOwner
from sandboxes.workers.pool import PooledWorker, WorkerLostError, WorkerPool, WorkerStuckError

log = structlog.get_logger()

SPARE_BYTES = 512 << 20
"""Larger databases get no spares, because each would take that much disk without being used."""
OPEN_S = 30.0
"""Time limit in seconds for connecting a worker to a clone, and for digesting what a statement changed."""


@dataclass(frozen=True, slots=True)
class PrivateClone:
    """A clone that only one sandbox uses, and the dedicated worker that is connected to it."""

    database: str
    worker: PooledWorker
    backend: int  # Process id of the worker's session on the server.


@dataclass(slots=True, eq=False)
class Template:
    """A frozen database: one state, from which clones are made."""

    server: PostgresServer
    name: str
    digest: DatabaseDigest
    settings: DatabaseSettings  # Each clone must be given them.
    # What the session whose state this is knew of sequences.
    sequence_use: SequenceUse = field(default_factory=SequenceUse)
    size_bytes: int = 0  # Size on the server's disk.
    root_bytes: int = 0  # Size of the root state that the rollout's writes began with.
    reader: str = ""  # Name of the clone for reading; empty until the first read.
    spares: deque[PrivateClone] = field(default_factory=deque)  # Private clones that wait for a sandbox.
    filling: bool = False  # A background task is creating spares.
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held while the reader is created.


class Clones:
    """Creates clones of templates, and drops them in the background."""

    def __init__(self, worker_pool: WorkerPool, max_spares: int) -> None:
        self._worker_pool, self._max_spares = worker_pool, max_spares
        self._background = TaskOwner()
        self._open = True

    async def reader(self, template: Template) -> str:
        """Return the name of a template's clone for reading. The first call creates it."""
        async with template.creating:
            if not template.reader:
                name = await template.server.clone(template.name, "read", template.settings)
                await template.server.admit(name)
                template.reader = name
        return template.reader

    def prepare(self, template: Template) -> None:
        """Create the clone for reading in the background. After a failure, the first read tries again."""
        self._background.spawn("prepare reader", self._prepare(template))

    async def fork(self, template: Template) -> PrivateClone:
        """Return a private clone: a spare, or a new one. Its worker may fail (WorkerLostError, WorkerStuckError)."""
        try:
            while template.spares:
                spare = template.spares.popleft()
                if spare.worker.alive:
                    return spare
                self._drop(template.server, spare.database)
            return await self._create(template, "fork")
        finally:
            self.restock(template)

    async def connect(
        self, template: Template, database: str, digest: DatabaseDigest, sequence_use: SequenceUse
    ) -> PrivateClone:
        """Connect a dedicated worker to a clone of a template. `digest` and `sequence_use` are those of the clone."""
        await template.server.admit(database)
        worker = await self._worker_pool.dedicated()
        request = OpenDatabase(template.server.agent_dsn(database), digest, sequence_use)
        opened = (await worker.ask(request, timeout_s=OPEN_S)).message
        return PrivateClone(database, worker, opened.backend)

    def restock(self, template: Template) -> None:
        """Create missing spares of a template in the background, if it is small enough."""
        if template.size_bytes <= SPARE_BYTES and len(template.spares) < self._max_spares and not template.filling:
            template.filling = True
            self._background.spawn("create spare clones", self._fill(template))

    def retire(self, template: Template) -> None:
        """Drop a template, its reader and its spares in the background."""
        self._drop_clones(template)
        self._drop(template.server, template.name)

    def release(self, server: PostgresServer, clone: PrivateClone) -> None:
        """End the worker of a private clone and drop the clone, in the background."""
        self._background.spawn("release clone", self._release(server, clone))

    async def idle(self) -> None:
        """Wait until nothing runs in the background."""
        await self._background.wait()

    async def aclose(self, templates: list[Template]) -> None:
        """Drop all readers and spares. Templates stay on the server for the next start."""
        self._open = False
        await self.idle()
        for template in templates:
            self._drop_clones(template)
        await self.idle()

    async def _prepare(self, template: Template) -> None:
        with contextlib.suppress(SandboxError, SpecError):
            await self.reader(template)

    async def _create(self, template: Template, kind: str) -> PrivateClone:
        database = await template.server.clone(template.name, kind, template.settings)
        try:
            return await self.connect(template, database, template.digest, template.sequence_use)
        except BaseException:
            self._drop(template.server, database)
            raise

    async def _fill(self, template: Template) -> None:
        try:
            while self._open and len(template.spares) < self._max_spares:
                template.spares.append(await self._create(template, "spare"))
        except (SandboxError, SpecError, WorkerLostError, WorkerStuckError) as error:
            log.warning("spare clone not created", database=template.name, error=str(error))
        finally:
            template.filling = False

    def _drop_clones(self, template: Template) -> None:
        reader, template.reader = template.reader, ""
        if reader:
            self._drop(template.server, reader)
        while template.spares:
            self.release(template.server, template.spares.popleft())

    def _drop(self, server: PostgresServer, database: str) -> None:
        self._background.spawn("drop database", server.drop(database))

    async def _release(self, server: PostgresServer, clone: PrivateClone) -> None:
        await clone.worker.close()
        await server.drop(clone.database)
