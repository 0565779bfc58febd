"""The cluster's database, on a real server that is killed as well."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import TypeVar

import psycopg
import pytest

from proxy.cluster.postgres import database as database_module
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase, LogRow, rows_digest
from proxy.cluster.postgres.joining import ClusterError, Membership
from proxy.execution.quotas import Quotas
from sandboxes.task_owner import start
from tests.proxy.cluster.relay import Relay
from tests.sandboxes.postgres_cluster import Cluster

T = TypeVar("T")
SECRET = b"the members' secret"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ends, and no statement is given up, because the machine is busy."""
    for module in ("joining", "database"):
        monkeypatch.setattr(f"proxy.cluster.postgres.{module}.LEASE_S", 60.0)
    monkeypatch.setattr("proxy.cluster.postgres.connection.PATIENCE_S", 30.0)


@asynccontextmanager
async def member(
    dsn: str, name: str, known: tuple[str, int] | None = None, secret: bytes = SECRET
) -> AsyncIterator[ClusterDatabase]:
    database = ClusterDatabase(dsn, secret)
    try:
        await database.join(name, f"{name}:1", known)
        yield database
    finally:
        await database.aclose()


def test_members_join_one_cluster(dsn: str) -> None:
    """Each data directory has a number of its own, and each start a greater boot."""

    async def run() -> None:
        async with member(dsn, "a") as first, member(dsn, "b") as second:
            a, b = first.membership, second.membership
            assert a.cluster == b.cluster
            assert (a.number, b.number) == (1, 2)
            assert await first.beat()
            peer = await second.member(a.number)
            assert peer is not None
            assert peer == (1, 1, "a", "a:1", True)
            async with member(dsn, "a", (a.cluster, a.number)) as again:
                assert again.membership == Membership(a.cluster, a.number, a.boot + 1)
                assert not await first.beat()

    asyncio.run(run())


async def use(database: ClusterDatabase, used: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Say what a member uses, and return what others do. On a busy machine, a statement may need a second attempt."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(DatabaseError):
                return {quota: sorted(each) for quota, each in (await database.use(used)).items()}


def keep_leases(dsn: str) -> None:
    """Let the leases of all members last until they end them."""
    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE forkpoint.members SET until = 'infinity'")


def test_members_hear_what_others_use(dsn: str) -> None:
    """What a member uses of a quota counts while its lease holds, and not if it is nothing."""

    async def run() -> None:
        async with member(dsn, "a") as first:
            async with member(dsn, "b") as second, member(dsn, "c") as third:
                keep_leases(dsn)
                assert await use(second, {"q": (3, 2), "r": (0, 0)}) == {}
                assert await use(third, {"q": (4, 0)}) == {"q": [(3, 2)]}
                assert await use(first, {"q": (1, 0)}) == {"q": [(3, 2), (4, 0)]}
                assert await use(third, {"q": (0, 0)}) == {"q": [(1, 0), (3, 2)]}
                assert await use(first, {"q": (1, 0)}) == {"q": [(3, 2)]}
            assert await use(first, {"q": (1, 0)}) == {}

    asyncio.run(run())


def test_members_divide_a_quota(dsn: str) -> None:
    """Two members with six calls each run two of four. Calls that run go on, and another tenant's call begins."""

    async def run() -> None:
        async with member(dsn, "a") as first, member(dsn, "b") as second:
            keep_leases(dsn)
            own, other = parts = [Quotas({"t-*": 4, "u-*": 4}, patience_s=60, max_waiting=100) for _ in range(2)]
            for database, part in zip((first, second), parts, strict=True):
                part.divide(partial(use, database))
            shares, over = [part.each["t-*"] for part in parts], asyncio.Event()

            async def call(part: Quotas, task: str) -> None:
                async with part.running(task):
                    await over.wait()

            async def exchange() -> list[int]:
                """Let new calls arrive and members hear of each other; return how many calls run on each."""
                for part in (*parts, *parts):
                    await asyncio.sleep(0)
                    await part.refresh()
                return [share.running for share in shares]

            calls = [start(call(own, "t-1")) for _ in range(6)]
            assert await exchange() == [4, 0]
            calls += [start(call(other, "t-2")) for _ in range(6)]
            # A quota that all calls exceed keeps no other tenant's call from running.
            calls.append(start(call(other, "u-1")))
            assert await exchange() == [4, 1]
            assert other.each["u-*"].running == 1
            for ended in calls[:2]:
                ended.cancel()
            await asyncio.wait(calls[:2])
            assert await exchange() == [2, 2]
            over.set()
            await asyncio.wait(calls)
            assert [share.usage for share in shares] == [(0, 0), (0, 0)]

    asyncio.run(run())


def test_one_process_has_a_name(dsn: str) -> None:
    """A name is free again when the lease of its member is over."""

    async def run() -> None:
        async with member(dsn, "a"):
            with pytest.raises(ClusterError, match="a member named 'a' is running"):
                async with member(dsn, "a"):
                    pass
        async with member(dsn, "a") as other:
            assert other.membership.number == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("secret", "known", "sentence"),
    [
        (b"another secret", None, "a cluster with another secret"),
        (SECRET, ("another", 1), "belongs to another cluster"),
    ],
)
def test_other_clusters_are_refused(dsn: str, secret: bytes, known: tuple[str, int] | None, sentence: str) -> None:
    """A second cluster on one database would write into the first one's logs."""

    async def run() -> None:
        async with member(dsn, "a"):
            with pytest.raises(ClusterError, match=sentence):
                async with member(dsn, "b", known, secret):
                    pass

    asyncio.run(run())


def test_a_foreign_schema_is_refused(server: Cluster, dsn: str) -> None:
    """It is left as it was."""
    with server.connect(dsn.rpartition("=")[2]) as connection:
        connection.execute("CREATE SCHEMA forkpoint")

    async def run() -> None:
        with pytest.raises(ClusterError, match="belongs to another program"):
            async with member(dsn, "a"):
                pass

    asyncio.run(run())


def test_an_unreachable_database_is_one_sentence() -> None:
    """No traceback of a library."""

    async def run() -> None:
        with pytest.raises(ClusterError, match=r"the cluster's database failed: .*Check --cluster"):
            async with member("host=127.0.0.1 port=1 user=nobody", "a"):
                pass

    asyncio.run(run())


def test_a_row_number_is_written_once(dsn: str) -> None:
    """The number is the fence: of two owners at most one writes the next row."""

    async def run() -> None:
        async with member(dsn, "a") as first, member(dsn, "b") as second:
            assert await first.append("task", 1, None)
            assert await first.append("task", 2, b"lines")
            assert not await second.append("task", 2, None)
            assert await second.append("task", 3, None)
            assert not await first.append("task", 3, b"late")
            rows = await log_of(first)
            assert rows == [(1, 1, None), (2, 1, b"lines"), (3, 2, None)]
            owner = await first.owner("task")
            assert owner is not None
            assert (owner.view, owner.peer.name, owner.peer.alive) == (3, "b", True)
            assert await first.owner("other") is None
        assert owner is not None

    asyncio.run(run())


async def compacted(database: ClusterDatabase, gone: list[int], body: bytes, read: list[bytes]) -> bool:
    digest = rows_digest(sha256(each).digest() for each in read)
    return await database.compact("task", gone, digest, body)


async def log_of(database: ClusterDatabase, task: str = "task") -> list[LogRow]:
    return [row async for rows in database.read(task) for row in rows]


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
def test_a_row_is_found_whatever_the_encoding(server: Cluster, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Neither the encoding of the database nor that of clients in the environment changes the names of tasks."""
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    name = f"encoding-{encoding.lower()}"
    with server.connect() as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        connection.execute(f"CREATE DATABASE \"{name}\" ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'")

    async def run() -> None:
        async with member(f"{server.dsn} dbname={name}", "a") as first:
            assert await first.append("tâche", 1, None)
            assert await first.append("tâche", 2, b"line")
            assert await log_of(first, "tâche") == [(1, 1, None), (2, 1, b"line")]
            assert await first.use({"tâche-*": (1, 0)}) == {}

    asyncio.run(run())


@pytest.mark.parametrize("page_bytes", [1, 100, 1 << 20])
def test_long_logs_come_in_pages(dsn: str, monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    """They are read as they were at one moment, whatever a compaction does meanwhile."""
    monkeypatch.setattr(database_module, "SHORT_ROWS", 10)
    monkeypatch.setattr(database_module, "PAGE_BYTES", page_bytes)

    async def run() -> None:
        async with member(dsn, "a") as first, member(dsn, "b") as second:
            assert await first.append("task", 1, None)
            for row in range(2, 50):
                assert await first.append("task", row, b"x" * row)
            before = await log_of(first)
            assert [len(row.body or b"") for row in before] == [0, *range(2, 50)]
            read, pages = list[LogRow](), second.read("task")
            async for page in pages:
                if not read:
                    assert await compacted(first, list(range(2, 50)), b"all", [b"x" * row for row in range(2, 50)])
                read += page
            assert read == before
            assert await log_of(second) == [(1, 1, None), (49, 1, b"all")]

    asyncio.run(run())


def test_numbers_of_replaced_rows_are_not_free(dsn: str) -> None:
    """A member that read the log before a compaction becomes no owner by it, and a replaced owner writes no row."""

    async def run() -> None:
        async with member(dsn, "a") as first, member(dsn, "b") as second:
            assert await first.append("task", 1, None)
            for row in (2, 3, 4, 5):
                assert await first.append("task", row, b"line")
            assert await compacted(first, [2, 3, 4, 5], b"lines", [b"line"] * 4)
            assert await log_of(first) == [(1, 1, None), (5, 1, b"lines")]
            # It has read rows 1 and 2.
            assert not await second.append("task", 3, None)
            # It has read four rows, of which one is left.
            assert not await compacted(second, [2, 3, 4, 5], b"others", [b"line"] * 4)
            # It has read the last one of them as it was before.
            assert not await compacted(second, [5], b"others", [b"line"])
            assert await second.append("task", 6, None)
            assert await second.append("task", 7, b"line")
            assert await second.append("task", 8, b"line")
            assert await compacted(second, [5, 7, 8], b"all", [b"lines", b"line", b"line"])
            assert not await first.append("task", 6, b"late")
            assert await log_of(first) == [(1, 1, None), (6, 2, None), (8, 2, b"all")]

    asyncio.run(run())


def test_rows_of_many_tasks_share_statements(dsn: str) -> None:
    """Each caller learns of its own row."""

    async def run() -> None:
        async with member(dsn, "a") as first:
            await first.append("task3", 1, None)
            written = await asyncio.gather(*(first.append(f"task{n}", 1, b"") for n in range(1200)))
            assert [n for n, ok in enumerate(written) if not ok] == [3]
            # More than a socket's buffers take at once.
            large = await asyncio.gather(*(first.append(f"large{n}", 1, bytes([n]) * (1 << 20)) for n in range(24)))
            assert all(large)
            rows = [row async for page in first.read("large23") for row in page]
            assert rows == [(1, 1, bytes([23]) * (1 << 20))]

    asyncio.run(run())


def test_an_owner_without_a_lease_is_not_alive(dsn: str) -> None:
    """Its successor may take the task over at once."""

    async def run() -> None:
        async with member(dsn, "b") as second:
            async with member(dsn, "a") as first:
                await first.append("task", 1, None)
            owner = await second.owner("task")
            assert owner is not None
            assert not owner.peer.alive

    asyncio.run(run())


def test_a_partition_does_not_hold_a_statement(server: Cluster, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a partition, the statement is given up, and nobody waits for the server to hear that it is cancelled."""

    async def run() -> None:
        async with Relay(server.port).running() as relay, member(relay.dsn(dsn), "a") as first:
            assert await first.owner("task") is None
            before, relay.left_bytes = relay.accepted, 0
            monkeypatch.setattr("proxy.cluster.postgres.connection.PATIENCE_S", 1.0)
            with pytest.raises(DatabaseError):
                await first.owner("task")
            assert relay.accepted == before
            relay.left_bytes = None
            monkeypatch.setattr("proxy.cluster.postgres.connection.PATIENCE_S", 30.0)
            assert await first.owner("task") is None

    asyncio.run(run())


def test_a_killed_server_loses_no_row(server: Cluster, dsn: str) -> None:
    """Rows that were acknowledged are there afterwards, each once; others are or are not."""

    async def again(act: Callable[[], Awaitable[T]]) -> T:
        for _ in range(300):
            try:
                return await act()
            except DatabaseError:
                await asyncio.sleep(0.1)
        raise AssertionError("the database did not come back")

    async def run() -> None:
        async with member(dsn, "a") as first:
            acknowledged: list[int] = []
            many = asyncio.Event()

            async def write() -> None:
                for row in range(1, 100_000):
                    assert await first.append("task", row, b"line")
                    acknowledged.append(row)
                    if row == 50:
                        many.set()

            writing = start(write())
            await many.wait()
            await asyncio.to_thread(server.kill)
            with pytest.raises(DatabaseError):
                await writing
            await asyncio.to_thread(server.start)
            await again(first.beat)
            rows = [row.row for row in await again(lambda: log_of(first))]
            assert rows == list(range(1, len(rows) + 1))
            assert len(acknowledged) <= len(rows) <= len(acknowledged) + 1

    asyncio.run(run())
