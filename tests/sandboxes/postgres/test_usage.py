"""Disk and locks of the server, which sandboxes share: a session that takes too much of them is ended."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.effects import Effect
from sandboxes.postgres.driver import PostgresDriver
from tests.sandboxes.box import opened
from tests.sandboxes.postgres_cluster import Cluster
from tests.sandboxes.sql_calls import ask

ROWS = "SELECT g, repeat(chr(97 + g % 20), 1000) AS x FROM generate_series(1, 30000) g"
SORT = "SELECT repeat(g::text, 200) AS x FROM generate_series(1, 60000) g ORDER BY 1"
EXCESSES = {
    "a table": (f"CREATE TABLE fill AS {ROWS}",),
    "a table that is being filled": (f"CREATE TABLE fill AS {ROWS}; SELECT pg_sleep(25)",),
    "an open transaction": ("BEGIN", f"CREATE TABLE fill AS {ROWS}"),
    "a procedure that commits": (f"DO $$ BEGIN CREATE TABLE fill AS {ROWS}; COMMIT; PERFORM pg_sleep(25); END $$",),
    "temporary files of a sort": (f"SELECT x, pg_sleep(25) FROM ({SORT}) s",),
    "temporary files of a cursor": (f"BEGIN; DECLARE c CURSOR FOR {SORT}; FETCH 1 FROM c; SELECT pg_sleep(25)",),
    "locks": ("SELECT count(pg_advisory_lock(g)) FROM generate_series(1, 600) g",),
    "locks while a call runs": (
        "SELECT count(pg_advisory_lock(g)) FROM generate_series(1, 600) g; SELECT pg_sleep(25)",
    ),
}


@pytest.mark.parametrize("how", EXCESSES)
def test_exceeding_sessions_are_ended(tmp_path: Path, cluster: Cluster, how: str) -> None:
    """The response says which limit, is nobody else's, and the state before it can still be used."""

    async def go() -> None:
        cluster.create("small", "CREATE TABLE t (a int)")
        driver = PostgresDriver(tmp_path / "postgres", spares=0)
        async with opened(driver):
            spec = cluster.spec("small", limits={"disk_mb": 16})
            sandbox = await driver.start(spec)
            *before, last = EXCESSES[how]
            for text in before:
                assert (await ask(sandbox, text, database="small")).error is None
            response = await ask(sandbox, last, database="small")
            assert response.error is not None
            assert response.error["kind"] == "limit"
            assert ("advisory locks" if "locks" in how else "limits.disk_mb allows 16") in response.message
            assert (response.shareable, response.effect) == (False, Effect.NONE)
            # A read has left nothing, so its sandbox goes on.
            assert sandbox.alive == ("sort" in how)
            await sandbox.close()
            fresh = await driver.start(spec)
            assert (await ask(fresh, "INSERT INTO t VALUES (1)", database="small")).error is None
            assert (await ask(fresh, "SELECT count(*) FROM t", database="small")).value == 1

    asyncio.run(go())


def test_limits_count_from_the_root_state(tmp_path: Path, cluster: Cluster) -> None:
    """A kept state counts what its rollout wrote before, and the source's own size does not count."""

    async def go() -> None:
        cluster.create("small", f"CREATE TABLE t AS {ROWS}")
        spec = cluster.spec("small", limits={"disk_mb": 16})
        grow = "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 9000) g"
        first = PostgresDriver(tmp_path / "postgres", spares=0)
        async with opened(first):
            sandbox = await first.start(spec)
            assert (await ask(sandbox, grow, database="small")).error is None
            frozen = await sandbox.freeze()
        second = PostgresDriver(tmp_path / "postgres", spares=0)
        async with opened(second):
            sandbox = await second.restore(spec, frozen)
            assert (await ask(sandbox, "SELECT count(*) FROM t", database="small")).value == 39000
            response = await ask(sandbox, grow, database="small")
            assert response.error is not None
            assert response.error["kind"] == "limit"

    asyncio.run(go())
