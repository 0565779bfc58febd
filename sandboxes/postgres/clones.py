"""Frozen databases on a server, and the clones that are made of them: for reading, for writing, and ahead of use."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from sandboxes.errors import SandboxError, SpecError
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.server import DatabaseSettings, PostgresServer
from sandboxes.workers.pool import Worker, WorkerLostError, WorkerPool, WorkerStuckError

log = structlog.get_logger()

SPARE_BYTES = 512 << 20
"""Of larger databases no clones are made ahead."""


OPEN_S = 30.0


@dataclass(frozen=True, slots=True)
class PrivateClone:
    """A clone that one sandbox alone uses, or will, and the worker that is connected to it."""

    database: str
    worker: Worker
    backend: int


@dataclass(slots=True, eq=False)
class Template:
    """A database that nobody connects to any more, at one state.

    touched: the sequences that the session used whose state this is, the last one last. reader: the clone that all who
    only read here share. spares: clones that wait for somebody who writes, each with a connection that has seen all
        that a first write looks at: that takes longer than the write.
    """

    server: PostgresServer
    name: str
    digest: DatabaseDigest
    settings: DatabaseSettings
    touched: tuple[str, ...] = ()
    size_bytes: int = 0
    reader: str = ""
    spares: deque[PrivateClone] = field(default_factory=deque)
    filling: bool = False
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class Clones:
    """Makes clones of templates, and drops what is no longer needed, in the background. most: spares of each."""

    def __init__(self, worker_pool: WorkerPool, most: int) -> None:
        self._worker_pool, self._most = worker_pool, most
        self._background: set[asyncio.Task[None]] = set()
        self._open = True

    async def reader(self, template: Template) -> str:
        """Return the database that all who read at this state share; one clone, made when first asked for."""
        async with template.making:
            if not template.reader:
                template.reader = await template.server.clone(template.name, "read", template.settings)
        return template.reader

    async def prepare(self, template: Template) -> None:
        """Make the clone for readers ahead; a failure meets whoever reads."""
        with contextlib.suppress(SandboxError, SpecError):
            await self.reader(template)

    async def fork(self, template: Template) -> PrivateClone:
        """Return a clone of one's own: one that waits, or a new one.

        Raises:
            SandboxError, SpecError: none can be made.
            WorkerLost, WorkerStuck: nobody can connect to it.
        """
        try:
            while template.spares:
                spare = template.spares.popleft()
                if spare.worker.alive:
                    return spare
                self.later(template.server.drop(spare.database))
            return await self._make(template, "fork")
        finally:
            self.restock(template)

    async def _make(self, template: Template, kind: str) -> PrivateClone:
        database = await template.server.clone(template.name, kind, template.settings)
        try:
            return await self.connect(template, database, template.digest, template.touched)
        except BaseException:
            self.later(template.server.drop(database))
            raise

    async def connect(
        self, template: Template, database: str, digest: DatabaseDigest, touched: tuple[str, ...]
    ) -> PrivateClone:
        """Connect a worker to a clone whose content has this digest, and that is to know these sequences."""
        worker = await self._worker_pool.dedicated()
        request = {
            "op": "open", "dsn": template.server.agent_dsn(database), "digest": digest.to_json(),
            "prime": list(touched),
        }  # fmt: skip
        told = await worker.request(request, timeout_s=OPEN_S)
        return PrivateClone(database, worker, int(told.fields["backend"]))

    def restock(self, template: Template) -> None:
        """Make clones of template ahead, where it is small enough for that."""
        if template.size_bytes <= SPARE_BYTES and len(template.spares) < self._most and not template.filling:
            template.filling = True
            self.later(self._fill(template))

    async def _fill(self, template: Template) -> None:
        try:
            while self._open and len(template.spares) < self._most:
                template.spares.append(await self._make(template, "spare"))
        except (SandboxError, SpecError, WorkerLostError, WorkerStuckError) as error:
            log.warning("no clone could be made ahead", database=template.name, error=str(error))
        finally:
            template.filling = False

    def retire(self, template: Template) -> None:
        """Drop a template and what was cloned of it ahead."""
        self._drop_clones(template)
        self.later(template.server.drop(template.name))

    def _drop_clones(self, template: Template) -> None:
        reader, template.reader = template.reader, ""
        if reader:
            self.later(template.server.drop(reader))
        while template.spares:
            self.later(self.give_up(template.server, template.spares.popleft()))

    async def give_up(self, server: PostgresServer, own: PrivateClone) -> None:
        """End the worker of a clone, and drop the clone."""
        await own.worker.close()
        await server.drop(own.database)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that nobody waits for until `aclose` does."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def idle(self) -> None:
        """Wait until nothing runs in the background."""
        while self._background:
            await asyncio.wait(self._background)

    async def aclose(self, templates: list[Template]) -> None:
        """Drop the clones that nobody can use any more; templates stay."""
        self._open = False
        await self.idle()
        for template in templates:
            self._drop_clones(template)
        with contextlib.suppress(Exception):
            await self.idle()
