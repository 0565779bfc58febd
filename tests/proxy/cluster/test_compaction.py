"""The logs of owned tasks are compacted."""

import asyncio

from proxy.cluster.compaction import compact_log, read_task
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.protocol import Entered, OwnedTask, Position

SECRET = b"the members' secret"


def test_an_owner_compacts_its_log(dsn: str) -> None:
    """A takeover reads the same from fewer rows, and the owner goes on writing."""

    async def run() -> None:
        database = ClusterDatabase(dsn, SECRET)
        await database.join("a", "a:1", None)
        try:
            assert await database.append("t", 1, None)
            failures = list[str]()
            owned = Owned("t", OwnedTask(1), database.append, lambda _, reason: failures.append(reason))
            for turn in range(20):
                await owned.write([Entered(7, 1, Position(turn, turn))])
            before = await read_task(database, "t")
            assert owned.rows == before.rows == 20
            await compact_log(database, owned)
            after = await read_task(database, "t")
            assert (after.last, after.rows, after.entered) == (before.last, 1, before.entered)
            assert (owned.rows, owned.lines) == (1, 1)
            await owned.write([Entered(7, 1, Position(20, 20))])
            assert failures == []
            await compact_log(database, owned)
            # Two rows become one, and one does not become less.
            await compact_log(database, owned)
            assert len((await read_task(database, "t")).layout) == 2
        finally:
            await database.aclose()

    asyncio.run(run())
