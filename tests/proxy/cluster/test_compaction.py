"""The logs of owned tasks are compacted."""

import asyncio
from collections.abc import Sequence

import pytest

from proxy.cluster import compaction, takeover
from proxy.cluster.compaction import compact_log, compact_logs, read_task
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.protocol import Ended, Steps
from proxy.telemetry.counters import Counters
from tests.proxy.cluster.test_takeover import record, stepped

SECRET = b"the members' secret"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give statements more time than a lease allows: no failure comes from a machine that is busy."""
    monkeypatch.setattr("proxy.cluster.postgres.connection.PATIENCE_S", 30.0)


def test_an_owner_compacts_its_log(dsn: str) -> None:
    """A takeover reads the same from fewer rows, and the owner goes on writing."""

    async def run() -> None:
        database = ClusterDatabase(dsn, SECRET)
        await database.join("a", "a:1", None)
        try:
            assert await database.append("t", 1, None)
            failures = list[str]()
            owned = Owned("t", 1, Steps(), database.append, lambda _, reason: failures.append(reason))
            for turn in range(20):
                await owned.write([stepped(7, turn, turn)])
            before = await read_task(database, "t")
            assert owned.rows == before.rows == 20
            await compact_log(database, owned)
            after = await read_task(database, "t")
            assert (after.last, after.rows, list(after.rest())) == (before.last, 1, list(before.rest()))
            # A step of the rollout each, and where it is.
            assert (owned.rows, owned.lines) == (1, 21)
            assert after.turns == before.turns
            await owned.write([stepped(7, 20, 20)])
            assert failures == []
            await compact_log(database, owned)
            # Two rows become one, and one does not become less.
            await compact_log(database, owned)
            assert len((await read_task(database, "t")).layout) == 2
        finally:
            await database.aclose()

    asyncio.run(run())


class BrokenDatabase(ClusterDatabase):
    """It fails at a step of a compaction, once: before the step, or after it without an answer."""

    steps, breaks_at, is_done_first = 0, -1, False

    async def compact(self, task: str, gone: Sequence[int], digest: bytes, body: bytes) -> bool:
        self.steps += 1
        if self.steps - 1 != self.breaks_at:
            return await super().compact(task, gone, digest, body)
        if self.is_done_first:
            await super().compact(task, gone, digest, body)
        raise DatabaseError("it restarts")


@pytest.mark.parametrize("is_done_first", [False, True])
def test_compaction_that_failed_is_tried_again(
    dsn: str, monkeypatch: pytest.MonkeyPatch, *, is_done_first: bool
) -> None:
    """At whichever step it broke off, and whether or not the step was done, the log says the same afterwards."""
    monkeypatch.setattr(compaction, "MIN_ROWS", 1)
    monkeypatch.setattr(takeover, "CHUNK_BYTES", 900)

    async def broken_at(step: int) -> int:
        """Compact the log of a task of its own; return how many steps that takes without a failure."""
        database, counts, task = BrokenDatabase(dsn, SECRET), Counters(), f"t{step}-{is_done_first}"
        await database.join(task, "a:1", None)
        try:
            assert await database.append(task, 1, None)
            owned = Owned(task, 1, Steps(), database.append, lambda _, reason: pytest.fail(reason))
            for turn in range(12):
                await owned.write([record(turn + 1, 10 + turn, b"k%d" % turn, 11 + turn), stepped(7, turn, turn)])
            await owned.write([Ended(7)])
            before = await read_task(database, task)
            database.breaks_at, database.is_done_first = step, is_done_first
            await compact_logs(database, {task: owned}, counts)
            assert counts.failures.get("compaction", 0) == (0 <= step < database.steps)
            half = await read_task(database, task)
            await compact_logs(database, {task: owned}, counts)
            after = await read_task(database, task)
            for each in (half, after):
                assert (each.records, list(each.rest())) == (before.records, list(before.rest()))
            assert owned.rows == after.rows < before.rows / 2
            await owned.write([stepped(8, 0, 0)])
            return database.steps
        finally:
            await database.aclose()

    steps = asyncio.run(broken_at(-1))
    assert steps > 2
    for step in range(steps):
        asyncio.run(broken_at(step))
