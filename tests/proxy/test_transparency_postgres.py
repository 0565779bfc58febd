"""Promise 1 with PostgreSQL: the whole engine, against private databases and a plain connection to each.

FORKPOINT_THOROUGH=20 runs twenty times as many examples; 125 groups of 8 are 1,000 sequences.
"""

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import pq

from proxy.dialects import sql as dialect
from proxy.engine import build_engine
from proxy.settings import Settings
from proxy.tree.keys import call_key
from sandboxes.errors import SandboxError
from sandboxes.pool.pool import OverloadedError
from sandboxes.postgres.driver import PostgresDriver
from sandboxes.postgres.values import reader_of
from tests.sandboxes.postgres_cluster import Cluster, cluster, require_postgres

EXAMPLES = 4 * int(os.environ.get("FORKPOINT_THOROUGH", "1"))
ROLLOUTS = 8
SOURCE = """
CREATE TABLE t (a int PRIMARY KEY, b text, c numeric(6, 2) DEFAULT 0.5);
INSERT INTO t SELECT n, 'row ' || n, n / 4.0 FROM generate_series(1, 12) n;
CREATE TABLE log (id serial PRIMARY KEY, note text, t int REFERENCES t DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE wide AS SELECT n AS a, repeat(chr(65 + n % 26), 60) AS b FROM generate_series(1, 6000) n;
CREATE VIEW v AS SELECT a, b FROM t WHERE c > 1;
CREATE FUNCTION noted(what text) RETURNS int LANGUAGE sql AS 'INSERT INTO log (note) VALUES (what) RETURNING id';
CREATE FUNCTION many() RETURNS bigint LANGUAGE plpgsql AS
    'BEGIN EXECUTE ''INSERT INTO log (note) VALUES (1)''; RETURN count(*) FROM log; END';
"""

READS = (
    "SELECT * FROM t ORDER BY a",
    "SELECT count(*) FROM log",
    "SELECT * FROM log",
    "SELECT sum(c), max(b) FROM t",
    "SELECT * FROM v",
    "SELECT missing FROM t",
    "SELECT 1/0",
    "SELEC",
    "TABLE t",
    "SELECT md5(string_agg(b, '' ORDER BY a)) FROM wide",
    "SELECT * FROM made",
    "EXPLAIN (COSTS OFF) SELECT * FROM t",
    "SHOW search_path",
    "SELECT currval('log_id_seq')",
    "SELECT lastval()",
    "SELECT * FROM tmp",
    "SELECT a FROM t WHERE a > 3 FOR UPDATE",
    "SELECT to_regclass('made')",
    "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'public' ORDER BY 1",
)
WRITES = (
    "INSERT INTO t VALUES (100, 'new')",
    "INSERT INTO t VALUES (1, 'twice')",
    "UPDATE t SET b = b || '!' WHERE a < 4",
    "UPDATE t SET c = c WHERE a = -1",
    "DELETE FROM t WHERE a = 5",
    "DELETE FROM t WHERE a > 90",
    "INSERT INTO log (note) VALUES ('x')",
    "INSERT INTO log (note, t) VALUES ('bad', 999)",
    "INSERT INTO log (note, t) VALUES ('y', 2) RETURNING id",
    "SELECT noted('f')",
    "SELECT many()",
    "SELECT nextval('log_id_seq')",
    "UPDATE wide SET b = 'z' WHERE a % 1000 = 7",
    "DELETE FROM wide WHERE a = 9",
    "TRUNCATE log",
    "TRUNCATE log RESTART IDENTITY",
    "WITH d AS (DELETE FROM log RETURNING id) SELECT count(*) FROM d",
    "UPDATE t SET a = a + 1000 WHERE a = 7; INSERT INTO log (note) VALUES ('pair')",
    "DELETE FROM log; SELECT 1/0",
    "DO $$ BEGIN UPDATE t SET b = 'do' WHERE a = 3; END $$",
    "INSERT INTO made VALUES (1)",
    "SELECT setval('log_id_seq', 40)",
)
SCHEMA = (
    "CREATE TABLE made (a int)",
    "DROP TABLE made",
    "ALTER TABLE t ADD COLUMN d int DEFAULT 4",
    "ALTER TABLE t DROP COLUMN d",
    "CREATE INDEX ON t (b)",
    "CREATE TABLE made AS SELECT * FROM t",
    "ALTER TABLE log ALTER note SET DEFAULT 'd'",
    "DROP VIEW v",
    "COMMENT ON TABLE t IS 'c'",
    "CREATE OR REPLACE VIEW v AS SELECT a, b FROM t WHERE a < 3",
    "ALTER TABLE made RENAME TO other",
    "VACUUM t",
)
SESSIONS = (
    "BEGIN",
    "BEGIN",
    "COMMIT",
    "COMMIT",
    "ROLLBACK",
    "ROLLBACK",
    "SAVEPOINT s",
    "ROLLBACK TO s",
    "RELEASE s",
    "CREATE TEMP TABLE tmp (a int)",
    "INSERT INTO tmp VALUES (1)",
    "DROP TABLE tmp",
    "SET search_path = pg_catalog",
    "RESET search_path",
    "SET LOCAL search_path = pg_catalog",
    "PREPARE p AS SELECT count(*) FROM t",
    "EXECUTE p",
    "DEALLOCATE p",
    "SELECT set_config('search_path', 'public, pg_catalog', false)",
    "BEGIN; DELETE FROM log; COMMIT",
    "BEGIN READ ONLY",
    "DECLARE c CURSOR WITH HOLD FOR SELECT a FROM t ORDER BY a",
    "FETCH 2 FROM c",
    "CLOSE c",
    "LOCK TABLE t",
    "DISCARD ALL",
)
RARE = (
    "ANALYZE wide",
    "CREATE INDEX by_a ON wide (a)",
    "DROP INDEX by_a",
    "ALTER TABLE t RENAME b TO bb",
    "ALTER TABLE t RENAME bb TO b",
    "CREATE MATERIALIZED VIEW made AS SELECT count(*) AS a FROM log",
    "REFRESH MATERIALIZED VIEW made",
    "CREATE TYPE mood AS ENUM ('low', 'high')",
    "ALTER TYPE mood ADD VALUE IF NOT EXISTS 'mid' BEFORE 'high'",
    "CREATE SEQUENCE s CACHE 3",
    "ALTER SEQUENCE log_id_seq INCREMENT 5",
    "ALTER TABLE log SET UNLOGGED",
    "CREATE RULE r AS ON DELETE TO t DO ALSO INSERT INTO log (note) VALUES ('gone')",
    "ALTER TABLE t ALTER c SET DEFAULT 9",
    "ALTER TABLE t ADD CONSTRAINT few CHECK (a < 1000) NOT VALID",
    "INSERT INTO tmp VALUES (2)",
    "UPDATE tmp SET a = a + 1",
    "TRUNCATE tmp",
    "CREATE TEMP SEQUENCE ts",
    "SELECT nextval('ts')",
    "CREATE TEMP TABLE t AS SELECT 'hides' AS a",
    "DROP TABLE pg_temp.t",
    "CREATE FUNCTION pg_temp.f() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM log'",
    "SELECT pg_temp.f()",
    "CREATE TEMP VIEW tv AS SELECT max(a) FROM t",
    "SELECT * FROM tv",
    "SET app.who = 'me'",
    "SELECT set_config('app.who', 'you', true)",
    "SELECT current_setting('app.who', true)",
    "RESET app.who",
    "DO $$ BEGIN PERFORM set_config('app.who', 'block', false); END $$",
    "SET application_name = 'mine'",
    "SET DateStyle = 'SQL, DMY'",
    "SELECT '2026-02-03'::date::text",
    "SET enable_seqscan = off",
    "EXPLAIN (COSTS OFF) SELECT * FROM wide WHERE a = 3",
    "SELECT name, custom_plans FROM pg_prepared_statements",
    "SELECT pg_advisory_lock(7)",
    "SELECT pg_advisory_unlock(7)",
    "SELECT lo_put(77, 0, 'abc')",
    "SELECT lo_create(77)",
    "SELECT lo_get(77)",
    "SET CONSTRAINTS ALL IMMEDIATE",
    "LISTEN news",
    "SELECT * FROM pg_listening_channels()",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "RESET ALL",
)
"""Statements whose effects are hard to see. `bench.differential` and thorough runs make them."""
END = (
    "ROLLBACK",
    "DISCARD ALL",
    "SELECT * FROM public.t ORDER BY a",
    "SELECT * FROM public.log ORDER BY id",
    "SELECT last_value, is_called FROM public.log_id_seq",
    "SELECT md5(string_agg(b, '' ORDER BY a)) FROM public.wide",
    "INSERT INTO public.log (note) VALUES ('end') RETURNING id",
)

POOLS = (READS, READS, WRITES, WRITES, SCHEMA, SESSIONS, *([RARE] if EXAMPLES > 4 else []))
statements = st.one_of(*(st.sampled_from(pool) for pool in POOLS))


@st.composite
def groups(draw: st.DrawFn) -> list[list[str]]:
    """Draw the statements of eight rollouts: they share a beginning, and leave it at places of their own."""
    trunk = draw(st.lists(statements, min_size=1, max_size=10))
    leaves = st.tuples(st.integers(0, len(trunk)), st.lists(statements, max_size=6))
    return [
        [*trunk[:cut], *suffix, *END] for cut, suffix in draw(st.lists(leaves, min_size=ROLLOUTS, max_size=ROLLOUTS))
    ]


def plainly(connection: psycopg.Connection[Any], statement: str) -> Any:
    """Return what a plain connection answers: the last result's columns and rows, or its error."""
    connection.pgconn.send_query(statement.encode())
    answer: Any = None
    while (result := connection.pgconn.get_result()) is not None:
        if result.status == pq.ExecStatus.FATAL_ERROR:
            answer = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
        else:
            width = range(result.nfields)
            rows = [[_value(result, row, n) for n in width] for row in range(result.ntuples)]
            answer = [[(result.fname(n) or b"").decode() for n in width], rows]
    return answer


def _value(result: Any, row: int, column: int) -> Any:
    data = result.get_value(row, column)
    return None if data is None else reader_of(result.ftype(column))(data.decode())


class Bench:
    """An engine on a server, and private databases beside it."""

    def __init__(self, runner: asyncio.Runner, running: Cluster, data: Path) -> None:
        self.runner, self.server = runner, running
        running.create("source", SOURCE)
        running.create("pristine", SOURCE)
        self.spec = running.spec("source")
        self.driver = PostgresDriver(data / "postgres", spares=4)
        self._settings = Settings(data=data, default_spec=self.spec, max_sandboxes=12, warm_sandboxes=0)
        self._tasks = itertools.count()

    async def open(self) -> None:
        self.engine = build_engine(self._settings, {"postgres": self.driver})
        await self.engine.open()

    async def together(self, group: list[list[str]], seed: int, harm: float) -> list[list[Any]]:
        task, dice = f"task{next(self._tasks)}", random.Random(seed)  # noqa: S311 - dice of a test
        walks = [self.walk(task, f"r{n}", sequence, dice, harm) for n, sequence in enumerate(group)]
        answers = await asyncio.gather(*walks)
        await self.engine.capture.drain()
        (await self.engine.tasks.open(task)).tree.check()
        await self.engine.forgetting.delete_task(task)
        await self.engine.pool.close_where(lambda _: True)
        await self.engine.evict_snapshots()
        return list(answers)

    async def walk(self, task: str, name: str, sequence: list[str], dice: random.Random, harm: float) -> list[Any]:
        answers = []
        for statement in sequence:
            await self._harm(dice, harm)
            body = orjson.dumps({"sql": statement, "max_rows": 10_000, "timeout_s": 60})
            call = dialect.parse("POST", "query", "", body, self.spec)
            rollout = await self.engine.tasks.rollout(task, name)
            for _ in range(50):
                with contextlib.suppress(SandboxError, OverloadedError):
                    key = call_key(call)
                    step = self.engine.step
                    record = step.known(rollout, key) or (await step.run(rollout, call, key)).record
                    break
            else:
                pytest.fail(f"{statement} never got an answer")
            body = orjson.loads(self.engine.store.records.result(record).body)
            error = body["error"]
            answers.append([body["columns"], body["rows"]] if error is None else error["message"].partition("\n")[0])
        return answers

    async def _harm(self, dice: random.Random, harm: float) -> None:
        """Close sandboxes and drop snapshots between calls: the next call then needs a restore or a replay."""
        if dice.random() < 0.3:
            await self.engine.capture.drain()
        if dice.random() < harm:
            await self.engine.pool.close_where(lambda _: dice.random() < 0.5)
        for snapshot in self.engine.snapshots:
            node = self.engine.trees.node(snapshot.tree, snapshot.node)
            if node is not None and not snapshot.leases and dice.random() < harm / 2:
                self.engine.cache.drop(node)

    def apart(self, sequence: list[str]) -> list[Any]:
        """Return what a database of one's own answers."""
        with self.server.connect() as admin:
            admin.execute("DROP DATABASE IF EXISTS private WITH (FORCE)")
            admin.execute("CREATE DATABASE private TEMPLATE pristine")
        with self.server.connect("private") as connection:
            return [plainly(connection, statement) for statement in sequence]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    require_postgres()
    with cluster() as running, asyncio.Runner() as runner:
        made = Bench(runner, running, tmp_path_factory.mktemp("postgres"))
        runner.run(made.open())
        yield made
        runner.run(made.engine.aclose())


# An example takes seconds, so none is made smaller: the message names the statements that led to the difference.
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(groups(), st.integers(0, 1 << 32), st.sampled_from([0, 0.2]))
def test_each_rollout_is_answered_as_if_alone(bench: Bench, group: list[list[str]], seed: int, harm: float) -> None:
    truth = {tuple(sequence): bench.apart(sequence) for sequence in group}
    result = bench.runner.run(bench.together(group, seed, harm))
    for sequence, answers in zip(group, result, strict=True):
        for turn, (mine, true) in enumerate(zip(answers, truth[tuple(sequence)], strict=True)):
            assert mine == true, f"turn {turn}: {sequence[: turn + 1]}"
