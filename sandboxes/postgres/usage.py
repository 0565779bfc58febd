"""What a session takes of its server: disk and locks, which PostgreSQL bounds for no session by itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psycopg

from sandboxes import task_owner
from sandboxes.errors import SpecError
from sandboxes.postgres.server import PostgresServer
from sandboxes.workers.pool import WorkerLostError

LOOK_S = 1.0
"""Time in seconds between two looks at a running call. A call can exceed its limit by what it writes in between."""
MAX_ADVISORY_LOCKS = 500
"""Limit of advisory locks that a session may hold. All sessions of a server share some 6,400 to 13,000 locks."""

_TEMPORARY_FILES = """(SELECT sum(f.size)::bigint FROM pg_catalog.pg_ls_tmpdir() f JOIN pg_catalog.pg_stat_activity a
    ON starts_with(f.name, 'pgsql_tmp' || a.pid || '.') WHERE a.datname = %(database)s AND {session})"""
_SESSION = "(a.application_name = %(session)s OR a.pid::text = %(session)s)"
_USAGE = f"""SELECT (SELECT pg_database_size(oid) FROM pg_catalog.pg_database WHERE datname = %(database)s),
    {{temporary}}, (SELECT count(*) FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND a.datname = %(database)s AND {_SESSION})"""


class ServerLimitError(Exception):
    """A session was ended because it took more of its server than its limits allow."""


@dataclass(frozen=True, slots=True)
class WatchedSession:
    """A session on a server, by its application name or process id, and how much it may take."""

    server: PostgresServer
    database: str
    name: str
    root_bytes: int  # Size from which the database may grow.
    disk_mb: int  # How much larger the database may be, with the session's temporary files.

    async def excess(self) -> str:
        """Return which limit the session exceeds, as a sentence; empty if none."""
        size, temporary, locks = await self._usage()
        grown = (size or 0) - self.root_bytes + (temporary or 0)
        if grown > self.disk_mb << 20:
            return (
                f"the database and its temporary files grew by {grown >> 20} MB, and limits.disk_mb allows "
                f"{self.disk_mb}. The session was ended: write less at a time, or drop tables first"
            )
        if locks > MAX_ADVISORY_LOCKS:
            return (
                f"the session held {locks} advisory locks, and it may hold {MAX_ADVISORY_LOCKS}. It was ended: release "
                "locks before taking more"
            )
        return ""

    async def _usage(self) -> tuple[int | None, int | None, int]:
        values = {"database": self.database, "session": self.name}
        try:
            (row,) = await self.server.rows(_USAGE.format(temporary=_TEMPORARY_FILES.format(session=_SESSION)), values)
        except psycopg.errors.InsufficientPrivilege:
            # Only superusers and members of pg_monitor see temporary files.
            (row,) = await self.server.rows(_USAGE.format(temporary="0"), values)
        size, temporary, locks = row
        return size, temporary, locks

    async def end_if_exceeding(self) -> str:
        """Look at the session, and end it if it exceeds a limit; return which, empty if none."""
        # A look that fails says nothing of the session. The next one sees the same.
        with contextlib.suppress(psycopg.Error, SpecError):
            if excess := await self.excess():
                await self.server.end(self.name)
                return excess
        return ""

    async def _watch(self) -> str:
        while True:
            await asyncio.sleep(LOOK_S)
            if excess := await self.end_if_exceeding():
                return excess

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look at the session while a call runs. Raises ServerLimitError if it exceeded a limit, and was ended."""
        watch = task_owner.start(self._watch())
        try:
            yield
        except WorkerLostError as error:
            if watch.done():
                raise ServerLimitError(watch.result()) from error
            raise
        else:
            if watch.done():
                raise ServerLimitError(watch.result())
        finally:
            watch.cancel()
