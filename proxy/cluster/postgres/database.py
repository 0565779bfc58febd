"""The cluster's PostgreSQL database: who is a member, who owns a task, and the log of each task.

All statements are single and idempotent, or conditional on a number
that is used once. So when a connection breaks, nothing has to be undone: `DatabaseError` then says that nobody knows
whether the statement ran, and the caller reads again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import NamedTuple

from proxy.cluster.postgres.connection import (
    Connection,
    DatabaseError,
    SteadyConnection,
    row_of,
    rows_of,
    run_all,
    second_row,
)
from proxy.cluster.postgres.joining import LEASE_S, ClusterError, Membership, join
from sandboxes.task_owner import TaskOwner

MAX_ROWS = 500
"""Most rows of one statement. 1,000 rows of 2 kB were measured at 31 ms; half of them bound the wait of the next."""
SHORT_ROWS = 1000
"""Most rows of a log that is read with one statement, and of a page of a longer one."""
PAGE_BYTES = 8 << 20
"""Bytes of a page of a log. A statement has 2 s (`PATIENCE_S`), so a link of 50 Mbit/s suffices."""

_APPEND = """
INSERT INTO forkpoint.lines (task, row, member, boot, body)
SELECT task, row, %s, %s, body FROM unnest(%s::text[], %s::bigint[], %b::bytea[]) AS lines (task, row, body)
ON CONFLICT DO NOTHING RETURNING task, row
"""
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('forkpoint ' || %(task)s, 0));"
"""Statements of one message are one transaction. The second one sees what was committed when it got the lock."""
_CLAIM = f"""{_LOCK}
INSERT INTO forkpoint.lines (task, row, member, boot, body)
SELECT %(task)s, %(row)s, %(member)s, %(boot)s, NULL
WHERE NOT EXISTS (SELECT FROM forkpoint.lines WHERE task = %(task)s AND row >= %(row)s)
ON CONFLICT DO NOTHING RETURNING row
"""
_COMPACT = f"""{_LOCK}
WITH whole AS (
    SELECT count(*) = %(count)s AND sha256(string_agg(sha256(body), ''::bytea ORDER BY row)) = %(digest)s AS holds
    FROM forkpoint.lines
    WHERE task = %(task)s AND row = ANY(%(gone)s) AND body IS NOT NULL),
replaced AS (
    UPDATE forkpoint.lines l SET body = %(body)s FROM whole
    WHERE whole.holds AND l.task = %(task)s AND l.row = %(row)s),
deleted AS (
    DELETE FROM forkpoint.lines l USING whole
    WHERE whole.holds AND l.task = %(task)s AND l.row = ANY(%(gone)s) AND l.row <> %(row)s)
SELECT holds FROM whole
"""
_SHORT_LOG = """
WITH first AS MATERIALIZED (
    SELECT row, member, body FROM forkpoint.lines WHERE task = %s ORDER BY row LIMIT %s),
size AS (SELECT coalesce(sum(octet_length(body)), 0) <= %s AS fits FROM first)
SELECT row, member, CASE WHEN fits THEN body END, fits FROM first, size ORDER BY row
"""
_LONG_LOG = """
BEGIN READ ONLY;
DECLARE log NO SCROLL CURSOR FOR SELECT row, member, body FROM forkpoint.lines WHERE task = %(task)s ORDER BY row
"""
_OWNER = """
SELECT l.row, l.member, l.boot, m.name, m.url, m.boot = l.boot AND m.until > clock_timestamp()
FROM forkpoint.lines l JOIN forkpoint.members m ON m.number = l.member
WHERE l.task = %s AND l.body IS NULL ORDER BY l.row DESC LIMIT 1
"""
_PEERS = "SELECT number, boot, name, url, until > clock_timestamp() FROM forkpoint.members"
_MEMBERS = """
WITH owners AS (
    SELECT DISTINCT ON (task) member, boot FROM forkpoint.lines WHERE body IS NULL ORDER BY task, row DESC)
SELECT number, boot, name, url, until > clock_timestamp(),
    (SELECT count(*) FROM owners o WHERE o.member = m.number AND o.boot = m.boot)
FROM forkpoint.members m ORDER BY name
"""
_TASKS = """
WITH owners AS (
    SELECT DISTINCT ON (task) task, member, boot FROM forkpoint.lines WHERE body IS NULL ORDER BY task, row DESC)
SELECT o.task FROM owners o JOIN forkpoint.members m ON m.number = o.member
WHERE NOT %s OR m.boot <> o.boot OR m.until <= clock_timestamp() ORDER BY o.task
"""
_BEAT = """
UPDATE forkpoint.members SET until = clock_timestamp() + %s * interval '1 second'
WHERE number = %s AND boot = %s RETURNING number
"""
_USE = """
WITH own AS (
    INSERT INTO forkpoint.usage (quota, member, boot, running, waiting)
    SELECT quota, %s, %s, running, waiting
    FROM unnest(%s::text[], %s::int[], %s::int[]) AS used (quota, running, waiting)
    ON CONFLICT (quota, member) DO UPDATE
    SET boot = excluded.boot, running = excluded.running, waiting = excluded.waiting)
SELECT u.quota, u.running, u.waiting
FROM forkpoint.usage u JOIN forkpoint.members m ON m.number = u.member AND m.boot = u.boot
WHERE u.member <> %s AND u.running + u.waiting > 0
    AND m.until > clock_timestamp()
"""


class Peer(NamedTuple):
    """A member as the database shows it."""

    number: int
    boot: int
    name: str
    url: str  # Where it accepts peers, `host:port`.
    alive: bool  # Whether its lease holds.


class Ownership(NamedTuple):
    """The latest owner of a task."""

    view: int  # Number of the row that made it the owner.
    peer: Peer  # The owner. It is alive only if it is the process that wrote the row and its lease holds.


class LogRow(NamedTuple):
    """A row of a task's log."""

    row: int
    member: int
    body: bytes | None  # Its lines; None if it says that the member owns the task.


def rows_digest(digests: Iterable[bytes]) -> bytes:
    """Return what says that rows are as they were read, from the SHA-256 of the body of each."""
    return sha256(b"".join(digests)).digest()


class ClusterDatabase:
    """The database as one member uses it. Appends have their own connection, so that a long read delays no answer."""

    def __init__(self, dsn: str, secret: bytes, membership: Membership | None = None) -> None:
        self._dsn, self._secret = dsn, secret
        self._reads, self._beats, self._appends = SteadyConnection(dsn), SteadyConnection(dsn), SteadyConnection(dsn)
        self._queue: list[tuple[str, int, bytes, asyncio.Future[bool]]] = []
        self._tasks, self._writing = TaskOwner(), False
        self._membership = membership

    @property
    def membership(self) -> Membership:
        """This member; only after `join`."""
        assert self._membership is not None
        return self._membership

    async def aclose(self) -> None:
        """End the lease, if the database can be reached, and close the connections."""
        await self._tasks.end()
        if self._membership is not None:
            statement = "UPDATE forkpoint.members SET until = '-infinity' WHERE number = %s AND boot = %s"
            values = (self._membership.number, self._membership.boot)
            # Without the database, the lease ends by itself.
            with contextlib.suppress(DatabaseError):
                await self._beats.run(lambda connection: connection.execute(statement, values))
        await self.disconnect()

    # -- members -----------------------------------------------------------------------------------------------------

    async def join(self, name: str, url: str, known: tuple[str, int] | None) -> Membership:
        """Create the tables where they are missing, and become a member. Raises ClusterError."""
        try:
            self._membership = await self._reads.run(
                lambda connection: join(connection, self._secret, name, url, known)
            )
        except DatabaseError as error:
            raise ClusterError(f"{error}. Check --cluster, and that the server accepts this user.") from error
        return self._membership

    async def use_store(self, store: str) -> bool:
        """Note the store that the cluster uses, by its name; return False if it uses another one."""
        statement = "UPDATE forkpoint.cluster SET store = %s WHERE store IS NULL OR store = %s RETURNING store"
        return await self._reads.run(lambda connection: row_of(connection, statement, (store, store))) is not None

    async def has_store(self) -> bool:
        """Return whether the cluster uses a store. Raises DatabaseError."""
        statement = "SELECT store IS NOT NULL FROM forkpoint.cluster"
        return await self._reads.run(lambda connection: row_of(connection, statement, ())) == (True,)

    async def server(self) -> tuple[str, float]:
        """Return the server's address, empty for a socket of this machine, and its time, in seconds since the epoch."""

        async def server(connection: Connection) -> tuple[str, float]:
            row = await row_of(connection, "SELECT extract(epoch FROM clock_timestamp())::float8", ())
            assert row is not None
            return connection.info.hostaddr, float(row[0])

        return await self._reads.run(server)

    async def disconnect(self) -> None:
        """Close the connections, which are opened again when they are needed. The lease stays."""
        for channel in (self._reads, self._beats, self._appends):
            await channel.aclose()

    async def beat(self) -> bool:
        """Extend the lease; return False if a later start of this member has taken its place. Raises DatabaseError."""
        values = (LEASE_S, self.membership.number, self.membership.boot)
        row = await self._beats.run(lambda connection: row_of(connection, _BEAT, values))
        return row is not None

    async def member(self, number: int) -> Peer | None:
        """Return a member by its number; None if there never was one. Raises DatabaseError."""
        row = await self._reads.run(lambda connection: row_of(connection, f"{_PEERS} WHERE number = %s", (number,)))
        return None if row is None else Peer(*row)

    async def members(self) -> list[tuple[Peer, int]]:
        """Return all members, each with the number of tasks that it owns, by name. It reads who owns each task."""
        rows = await self._reads.run(lambda connection: rows_of(connection, _MEMBERS, ()))
        return [(Peer(*row[:5]), row[5]) for row in rows]

    async def tasks(self, *, ownerless: bool = False) -> list[str]:
        """Return all tasks that ever had an owner, deleted ones too; or those whose owner has died."""
        rows = await self._reads.run(lambda connection: rows_of(connection, _TASKS, (ownerless,)))
        return [row[0] for row in rows]

    async def use(self, used: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
        """Write what this member uses of quotas, and return what other members use whose leases hold."""
        running, waiting = zip(*used.values(), strict=True)
        number, boot = self.membership.number, self.membership.boot
        values = (number, boot, list(used), list(running), list(waiting), number)
        others: dict[str, list[tuple[int, int]]] = {}
        for quota, *calls in await self._reads.run(lambda connection: rows_of(connection, _USE, values)):
            others.setdefault(quota, []).append((calls[0], calls[1]))
        return others

    # -- logs --------------------------------------------------------------------------------------------------------

    async def owner(self, task: str) -> Ownership | None:
        """Return the latest owner of a task, whether it is alive or not; None if it never had one."""
        row = await self._reads.run(lambda connection: row_of(connection, _OWNER, (task,)))
        if row is None:
            return None
        view, number, boot, name, url, alive = row
        return Ownership(view, Peer(number, boot, name, url, alive))

    async def read(self, task: str) -> AsyncGenerator[list[LogRow]]:
        """Yield the log of a task, in order, as it was at one moment. Use `aclosing` around it.

        A short log is one statement. A longer one comes in pages over a connection of its own: each page has the time
        of a statement, other reads do not wait, and only a page is in memory twice. Raises DatabaseError.
        """
        values = (task, SHORT_ROWS + 1, PAGE_BYTES)
        rows = await self._reads.run(lambda connection: rows_of(connection, _SHORT_LOG, values))
        if len(rows) <= SHORT_ROWS and all(is_whole for *_, is_whole in rows):
            yield [LogRow(*row) for *row, _ in rows]
            return
        pages = SteadyConnection(self._dsn)
        try:
            # A cursor shows what was there when it was declared, so a compaction meanwhile changes nothing.
            await pages.run(lambda connection: run_all(connection, _LONG_LOG, {"task": task}))
            count = 8
            while rows := await pages.run(partial(rows_of, statement=f"FETCH {count} FROM log", values=())):
                yield [LogRow(*row) for row in rows]
                size_bytes = sum(len(body or b"") for *_, body in rows) + 1
                # Rows that a compaction wrote have megabytes, and others some hundred bytes.
                count = max(1, min(4 * count, SHORT_ROWS, count * PAGE_BYTES // size_bytes))
        finally:
            await pages.aclose()

    async def append(self, task: str, row: int, body: bytes | None) -> bool:
        """Write a row if its number follows the last one of the task; return whether it was written.

        Without a body the row says that this member owns the task from here on.

        Rows of all tasks that come up while a statement runs share the next one: 0.25 ms for one row alone, 1 ms for 64
        at once, on a disk with an fsync of 0.2 ms (`python -m bench.cluster --log`). Raises DatabaseError.
        """
        if body is None:
            own = self.membership
            values = {"task": task, "row": row, "member": own.number, "boot": own.boot}
            return await self._reads.run(lambda connection: second_row(connection, _CLAIM, values)) is not None
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((task, row, body, written))
        if not self._writing:
            self._writing = True
            self._tasks.spawn("cluster log", self._write())
        return await written

    async def compact(self, task: str, gone: Sequence[int], digest: bytes, body: bytes) -> bool:
        """Replace rows by one under the last number; return False if they are not as they were read (`rows_digest`)."""
        values = {
            "task": task, "gone": list(gone), "count": len(gone), "digest": digest, "row": gone[-1], "body": body,
        }  # fmt: skip
        return await self._reads.run(lambda connection: second_row(connection, _COMPACT, values)) == (True,)

    async def _write(self) -> None:
        """Write what is queued, until nothing is. However it ends, each row that was queued is answered."""
        try:
            while self._queue:
                group, self._queue = self._queue[:MAX_ROWS], self._queue[MAX_ROWS:]
                await self._write_group(group)
        finally:
            self._writing = False
            left, self._queue = self._queue, []
            _fail([future for *_, future in left], DatabaseError("the rows before this one were not written"))

    async def _write_group(self, group: list[tuple[str, int, bytes, asyncio.Future[bool]]]) -> None:
        tasks, rows, bodies, futures = map(list, zip(*group, strict=True))
        values = (self.membership.number, self.membership.boot, tasks, rows, bodies)
        # A caller that was cancelled has cancelled its future; its row is written all the same.
        waiting = [(number, future) for number, future in enumerate(futures) if not future.done()]
        try:
            written = set(await self._appends.run(partial(rows_of, statement=_APPEND, values=values, prepare=True)))
        except BaseException as error:
            is_known = isinstance(error, DatabaseError)
            _fail(futures, error if is_known else DatabaseError(f"the log was not written: {error!r}"))
            # A defect is reported, and a cancellation goes on. Neither may leave a caller without an answer.
            if not is_known:
                raise
        else:
            for number, future in waiting:
                if not future.done():
                    future.set_result((tasks[number], rows[number]) in written)


def _fail(futures: Iterable[asyncio.Future[bool]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
