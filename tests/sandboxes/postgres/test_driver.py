"""The `postgres` driver on a real server: reads, writes, sessions, limits and clean-up."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest

from sandboxes.driver import FrozenState
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.postgres.driver import PostgresDriver
from sandboxes.spec import Database, EnvironmentSpec
from tests.machine import wait_until
from tests.sandboxes.box import opened
from tests.sandboxes.postgres_cluster import SHOP, Cluster
from tests.sandboxes.sql_calls import SqlResponse, ask

NONE, DATABASE, SESSION = Effect.NONE, Effect.DATABASE, Effect.SESSION
Test = Callable[[PostgresDriver], Awaitable[None]]


@pytest.fixture
def shop(cluster: Cluster) -> Cluster:
    cluster.create("shop")
    return cluster


def driven(tmp_path: Path, test: Test, *, spares: int = 0) -> None:
    async def go() -> None:
        driver = PostgresDriver(tmp_path / "postgres", spares=spares)
        async with opened(driver):
            await test(driver)

    asyncio.run(go())


def responses_to(tmp_path: Path, shop: Cluster, *statements: str, **spec: Any) -> list[SqlResponse]:
    """Run statements in a new sandbox and return their responses."""
    answers: list[SqlResponse] = []

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop", **spec))
        answers.extend([await ask(sandbox, statement) for statement in statements])

    driven(tmp_path, test)
    return answers


@pytest.mark.parametrize("state", ["53200", "57P03", "58030", "XX000", "40001", "40P01", "22012"])
def test_what_the_server_lacks_is_no_shared_answer(tmp_path: Path, shop: Cluster, state: str) -> None:
    """The memory that another session took, a deadlock with it: such a failure is its own rollout's."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        raises = f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$"
        response = await ask(sandbox, raises)
        assert response.error is not None
        assert (response.error["code"], response.shareable) == (state, state == "22012")

    driven(tmp_path, test)


READS = [
    "SELECT 1",
    "SELECT * FROM item WHERE id < 3",
    "SELECT * FROM dear ORDER BY id",
    "WITH x AS (SELECT id FROM item) SELECT count(*) FROM x",
    "VALUES (1), (2)",
    "TABLE item",
    "SHOW work_mem",
    "EXPLAIN SELECT * FROM item",
    "SELECT * FROM missing",
    "SELEC 1",
    "SELECT 1/0",
    "SELECT id FROM sale WHERE false",
    "SELECT current_setting('work_mem')",
    "SELECT pg_sleep(0)",
    "SELECT * FROM sale FOR UPDATE",
    "UPDATE item SET stock = 1 WHERE false",
    "DELETE FROM item WHERE id = -1",
    "INSERT INTO item SELECT * FROM item WHERE false",
    "INSERT INTO item (id, name) VALUES (1, 'twice')",
    "EXPLAIN INSERT INTO item (id, name) VALUES (99, 'x')",
    "SAVEPOINT s",
    "LOCK TABLE item",
    "COMMIT",
    "ROLLBACK",
    "DO $$ BEGIN PERFORM 1; END $$",
    "CREATE DATABASE mine",
    "DROP DATABASE shop",
    "COPY item TO PROGRAM 'cat'",
    "COPY item TO '/tmp/x'",
    "COPY item FROM '/etc/passwd'",
    "COPY item TO STDOUT",
    "COPY item FROM STDIN",
    "SELECT pg_read_file('/etc/passwd')",
    "SELECT lo_import('/etc/passwd')",
    "SET ROLE postgres",
    "SET SESSION AUTHORIZATION postgres",
    "ALTER SYSTEM SET work_mem = '1GB'",
    "CREATE ROLE mine",
    "SELECT pg_terminate_backend(1)",
    "CREATE EXTENSION file_fdw",
    "CREATE FUNCTION f() RETURNS int LANGUAGE c AS 'libc', 'system'",
    "SELECT 1; SELECT 2",
    "EXPLAIN ANALYZE SELECT * FROM item",
]
DRAWS = {
    "SELECT sell(1, 2)", "SELECT nextval('sale_id_seq')", "SELECT setval('sale_id_seq', 500)",
    "INSERT INTO sale (item, amount) VALUES (9999, 1)",
}  # fmt: skip
"""Those of `WRITES` that draw from a sequence or set it."""
WRITES = [
    "INSERT INTO item (id, name) VALUES (99, 'new')",
    "UPDATE item SET stock = 100 WHERE id = 1",
    "DELETE FROM sale WHERE id = 1",
    "WITH gone AS (DELETE FROM sale WHERE id = 2 RETURNING *) SELECT count(*) FROM gone",
    "EXPLAIN ANALYZE INSERT INTO item (id, name) VALUES (98, 'x')",
    "SELECT sell(1, 2)",
    "SELECT nextval('sale_id_seq')",
    "SELECT setval('sale_id_seq', 500)",
    "CREATE TABLE made (a int)",
    "SELECT * INTO copied FROM item",
    "CREATE TABLE copied AS SELECT * FROM item",
    "ALTER TABLE item ADD COLUMN extra text",
    "DROP VIEW dear",
    "TRUNCATE sale",
    "CREATE INDEX ON item (name)",
    "COMMENT ON TABLE item IS 'things'",
    "GRANT SELECT ON item TO PUBLIC",
    "DO $$ BEGIN INSERT INTO item (id, name) VALUES (97, 'x'); END $$",
    "DELETE FROM sale WHERE id = 1; DELETE FROM sale WHERE id = 2",
    "BEGIN; DELETE FROM sale; COMMIT",
    "INSERT INTO sale (item, amount) VALUES (9999, 1)",  # fails, and has drawn a number
    "CREATE SCHEMA mine",
    "CREATE TYPE mood AS ENUM ('sad')",
    "CREATE SEQUENCE counter",
    "SELECT lo_create(0)",
    "VACUUM item",
    "ANALYZE item",
    "/* plans */ REINDEX TABLE item",
    "DO $$ BEGIN EXECUTE 'ANA' || 'LYZE item'; END $$",
    "CREATE OPERATOR === (LEFTARG = int, RIGHTARG = int, PROCEDURE = int4eq)",
    "ALTER FUNCTION sell(int, int) SECURITY DEFINER",
    "ALTER TABLE item ALTER name SET STATISTICS 10",
    "BEGIN; CREATE CAST (item AS text) WITH INOUT; COMMIT",
]
SESSIONS = [
    "BEGIN",
    "SET work_mem = '1MB'",
    "SELECT set_config('work_mem', '2MB', false)",
    "CREATE TEMP TABLE t (a int)",
    "PREPARE p AS SELECT 1",
    "LISTEN news",
    "SELECT pg_advisory_lock(1)",
    "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "SET app.who = 'me'",
    "SET /* not shown */ app.who TO 'me'",
    "SET a😀.who = 'me'",
    'SET U&"\\0061pp".who = 1',
    """SELECT U&"set\\005fconfig"('app.who', 'me', false)""",
    "RESET app.who",
    "DO $$ BEGIN EXECUTE format('SET %I.who = 1', 'app'); END $$",
    "SET client_encoding = 'LATIN1'",
    "SET application_name = 'mine'",
    "SELECT setseed(0.5)",
    "SET seed TO 0.5",
    "CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql AS 'SELECT 7'",
    "CREATE TYPE pg_temp.mood AS ENUM ('low')",
]
HIDDEN = {
    "RESET app.who": ("SET app.who = 'me'", "SELECT current_setting('app.who', true)"),
    "DISCARD ALL": ("SET app.who = 'me'", "SELECT current_setting('app.who', true)"),
    "INSERT INTO tmp VALUES (1)": ("CREATE TEMP TABLE tmp (a int)", "SELECT sum(a) FROM tmp"),
    "BEGIN; INSERT INTO tmp VALUES (1); COMMIT": ("CREATE TEMP TABLE tmp (a int)", "SELECT sum(a) FROM tmp"),
    "UPDATE tmp SET a = 2": ("CREATE TEMP TABLE tmp AS SELECT 1 AS a", "SELECT sum(a) FROM tmp"),
    "TRUNCATE tmp": ("CREATE TEMP TABLE tmp AS SELECT 1 AS a", "SELECT sum(a) FROM tmp"),
    "SELECT nextval('tmp')": ("CREATE TEMP SEQUENCE tmp", "SELECT nextval('tmp')"),
    "SELECT random() > 2": ("SELECT setseed(0.5)", "SELECT random()"),
    "SELECT lo_open(lo_create(7), 131072)": ("BEGIN", "SELECT lo_tell(0)"),
    "SELECT set_config('app.who', 'me', true)": ("BEGIN", "SELECT current_setting('app.who', true)"),
    "SET application_name = 'mine'": ("SELECT 1", "SHOW application_name"),
    "EXECUTE p": ("PREPARE p AS SELECT 1", "SELECT custom_plans + generic_plans FROM pg_prepared_statements"),
}
"""Statements whose effect on the session is in no catalog, with one before each and one that shows the effect."""


def test_reads_need_no_private_clone(tmp_path: Path, shop: Cluster) -> None:
    """Every statement of `READS` runs on the state's shared reader."""

    async def test(driver: PostgresDriver) -> None:
        effects = {}
        for statement in READS:
            sandbox = await driver.start(shop.spec("shop"))
            effects[statement] = (await ask(sandbox, statement)).effect
            await sandbox.close()
        assert effects == dict.fromkeys(READS, NONE)
        sandbox = await driver.start(shop.spec("shop"))
        for statement in READS[:14]:
            await ask(sandbox, statement)
        assert all(position.clone is None for position in sandbox.positions.values())

    driven(tmp_path, test)


def test_writes_change_the_database(tmp_path: Path, shop: Cluster) -> None:
    """Every statement of `WRITES` has the effect DATABASE, however it hides the write.

    One that draws from a sequence also changes what `currval` knows, which is session state.
    """

    async def test(driver: PostgresDriver) -> None:
        effects = {}
        for statement in WRITES:
            sandbox = await driver.start(shop.spec("shop"))
            effects[statement] = (await ask(sandbox, statement)).effect
            await sandbox.close()
        assert effects == {text: DATABASE | SESSION if text in DRAWS else DATABASE for text in WRITES}

    driven(tmp_path, test)


def test_connection_state_is_session_state(tmp_path: Path, shop: Cluster) -> None:
    """Settings, prepared statements, locks and the like cannot be frozen."""

    async def test(driver: PostgresDriver) -> None:
        for statement in SESSIONS:
            sandbox = await driver.start(shop.spec("shop"))
            answer = await ask(sandbox, statement)
            assert (statement, answer.error, answer.effect & SESSION, answer.state) == (statement, None, SESSION, None)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            await sandbox.close()

    driven(tmp_path, test)


def test_what_no_catalog_shows_is_session_state(tmp_path: Path, shop: Cluster) -> None:
    """Custom settings, rows of temporary tables and the like are changes, and a replay reaches them.

    A second run has the same witness, and plain PostgreSQL shows the same.
    """

    async def test(driver: PostgresDriver) -> None:
        for statement, (before, look) in HIDDEN.items():
            plain = await asyncio.to_thread(plain_values, shop, [before, *statement.split("; "), look])
            answers = []
            for _ in range(2):
                sandbox = await driver.start(shop.spec("shop"))
                await ask(sandbox, before)
                changed = [await ask(sandbox, part) for part in statement.split("; ")][-1]
                assert (statement, changed.effect & SESSION, changed.state) == (statement, SESSION, None)
                shown = await ask(sandbox, look)
                answers.append(shown.error["code"] if shown.error else shown.value)
                answers.append(changed.witness if "lo_create" not in statement else None)
                await sandbox.close()
            assert answers[:2] == answers[2:], statement
            assert answers[0] == plain[-1], statement

    driven(tmp_path, test)


def test_settings_of_one_rollout_stay_hidden_from_others(tmp_path: Path, shop: Cluster) -> None:
    """A custom setting that was tried on the shared reader would stay there, empty."""

    async def test(driver: PostgresDriver) -> None:
        for number, text in enumerate(("SET app.{} = 'x'", "RESET app.{}", "SELECT set_config('app.{}', 'x', true)")):
            sandboxes = [await driver.start(shop.spec("shop")) for _ in range(2)]
            await ask(sandboxes[0], text.format(f"n{number}"))
            shown = await ask(sandboxes[1], f"SELECT current_setting('app.n{number}', true)")
            assert shown.rows == [[None]]
            for sandbox in sandboxes:
                await sandbox.close()

    driven(tmp_path, test)


def test_open_transaction_spans_calls(tmp_path: Path, shop: Cluster) -> None:
    """Calls see the transaction's changes until it is committed, rolled back, or fails."""
    count = "SELECT count(*) FROM sale"
    undone = ("BEGIN", "DELETE FROM sale", count, "ROLLBACK", count)
    failed = ("BEGIN", "DELETE FROM sale", "SELECT 1/0", "SELECT 1", "COMMIT", count)
    done = ("BEGIN", "DELETE FROM sale WHERE id > 5", "COMMIT", count)
    answers = responses_to(tmp_path, shop, *undone, *failed, *done)
    assert [a.effect for a in answers[:5]] == [SESSION, SESSION, NONE, SESSION, NONE]
    assert [answers[n].value for n in (2, 4, 10, 14)] == [0, 20, 20, 5]
    assert "current transaction is aborted" in answers[8].message
    assert answers[13].effect == SESSION | DATABASE
    assert answers[3].state == answers[4].state
    assert answers[10].state == answers[4].state


def test_cursors_and_savepoints_are_session_state(tmp_path: Path, shop: Cluster) -> None:
    """A FETCH moves a cursor, so equal calls return different rows and have different witnesses."""
    cursor = (
        "DECLARE c CURSOR WITH HOLD FOR SELECT id FROM item ORDER BY id",
        "FETCH 2 FROM c",
        "FETCH 2 FROM c",
        "CLOSE c",
    )
    _, one, two, closed = responses_to(tmp_path, shop, *cursor)
    assert (one.rows, two.rows) == ([[1], [2]], [[3], [4]])
    assert one.effect == two.effect == closed.effect == SESSION
    assert None not in {one.witness, two.witness}
    assert one.witness != two.witness
    points = ("BEGIN", "SAVEPOINT s", "DELETE FROM sale", "ROLLBACK TO s", "SELECT count(*) FROM sale", "ROLLBACK")
    answers = responses_to(tmp_path, shop, *points)
    assert [a.effect for a in answers] == [SESSION, SESSION, SESSION, SESSION, NONE, SESSION]
    assert answers[4].value == 20


def test_failed_statements_leave_nothing(tmp_path: Path, shop: Cluster) -> None:
    """A failed text rolls back all its statements."""
    before, failed, several, after = responses_to(
        tmp_path, shop, "UPDATE item SET stock = 1 WHERE id = 1", "INSERT INTO item (id, name) VALUES (1, 'twice')",
        "DELETE FROM sale; SELECT 1/0", "SELECT count(*) FROM sale",
    )  # fmt: skip
    assert failed.error is not None
    assert failed.error["code"] == "23505"
    assert (failed.effect, several.effect, after.value) == (NONE, NONE, 20)
    assert before.state == failed.state == several.state


def test_definitions_that_differ_are_other_states(tmp_path: Path, shop: Cluster) -> None:
    """Agents see the difference by an order, a right, or a plan, so neither may get the other's answers."""
    function = "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'"
    rule = "CREATE RULE r{} AS ON DELETE TO t DO ALSO SELECT 1"
    alike = {
        "CREATE DOMAIN d1 AS int; CREATE DOMAIN d2 AS int": "ALTER DOMAIN d{} ADD CONSTRAINT c CHECK (VALUE > 0)",
        f"CREATE TABLE t (); {rule.format(1)}; {rule.format(2)}": "ALTER TABLE t DISABLE RULE r{}",
        "SELECT lo_create(1); SELECT lo_create(2)": "SELECT lo_unlink({})",
    }
    pairs = [
        ("CREATE TABLE made (a text)", 'CREATE TABLE made (a text COLLATE "C")'),
        (function, f"{function} SECURITY DEFINER"),
        (
            "CREATE AGGREGATE s(int) (SFUNC = int4pl, STYPE = int)",
            "CREATE AGGREGATE s(int) (SFUNC = int4mul, STYPE = int)",
        ),
        ("CREATE DOMAIN d AS int", "CREATE DOMAIN d AS int NOT NULL"),
        ("CREATE DOMAIN d AS text", 'CREATE DOMAIN d AS text COLLATE "C"'),
        ("CREATE TYPE e AS ENUM ('a,b')", "CREATE TYPE e AS ENUM ('a', 'b')"),
        *((f"{made}; {change.format(1)}", f"{made}; {change.format(2)}") for made, change in alike.items()),
        ("CREATE TABLE t (a int)", "CREATE TABLE t (a int, b int); ALTER TABLE t DROP b"),
        (
            "CREATE MATERIALIZED VIEW m AS SELECT WHERE false",
            "CREATE MATERIALIZED VIEW m AS SELECT WHERE false WITH NO DATA",
        ),
    ]

    async def test(driver: PostgresDriver) -> None:
        for pair in pairs:
            states = []
            for text in pair:
                sandbox = await driver.start(shop.spec("shop"))
                answer = await ask(sandbox, text)
                assert answer.error is None
                states.append(answer.state)
                await sandbox.close()
            assert states[0] != states[1], pair

    driven(tmp_path, test)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("client_encoding = 'LATIN1'", {"text_base64": "6Q=="}), ("client_encoding = 'SQL_ASCII'", "é")],
)
def test_texts_in_other_encodings_are_answered(tmp_path: Path, shop: Cluster, setting: str, value: object) -> None:
    """They neither end the session, nor hide the names of types."""
    answer = responses_to(tmp_path, shop, f"SET {setting}", "SELECT chr(233)")[-1]
    assert answer.value == value
    assert answer.body["types"] == ["text"]


def test_blobs_are_the_same_in_both_forms(tmp_path: Path, shop: Cluster) -> None:
    """`bytea_output` changes how the server writes them, and not what a rollout is told."""
    statement = r"SELECT '\x005c78ff4131'::bytea"
    hexadecimal, _, escaped = responses_to(tmp_path, shop, statement, "SET bytea_output = 'escape'", statement)
    assert hexadecimal.value == escaped.value == {"base64": "AFx4/0Ex"}


def test_procedures_may_commit(tmp_path: Path, shop: Cluster) -> None:
    """What they have committed before they fail stays, as without the proxy."""
    body = "BEGIN INSERT INTO sale (item, amount) VALUES (1, 1); COMMIT; PERFORM 1 / divisor; END"
    _, done, failed, count = responses_to(
        tmp_path, shop, f"CREATE PROCEDURE add(divisor int) LANGUAGE plpgsql AS $$ {body} $$",
        "CALL add(1)", "CALL add(0)", "SELECT count(*) FROM sale",
    )  # fmt: skip
    assert (done.error, count.value) == (None, 22)
    assert "division by zero" in failed.message
    assert done.effect & failed.effect & DATABASE
    assert done.state != failed.state == count.state


def test_plans_of_others_are_not_changed(tmp_path: Path, shop: Cluster) -> None:
    """ANALYZE changes a table's estimates although its transaction is read-only, and rolled back."""
    plan = "EXPLAIN SELECT * FROM item"

    async def test(driver: PostgresDriver) -> None:
        one, two = [await driver.start(shop.spec("shop")) for _ in range(2)]
        before = (await ask(one, plan)).rows
        await ask(two, "ANALYZE item")
        assert (await ask(two, plan)).rows != before
        assert (await ask(one, plan)).rows == before

    driven(tmp_path, test)


def test_undone_change_restores_the_state(tmp_path: Path, shop: Cluster) -> None:
    """The digest depends on the schema itself, not on its history."""
    start, made, dropped = responses_to(tmp_path, shop, "SELECT 1", "CREATE TABLE made (a int)", "DROP TABLE made")
    assert start.state == dropped.state != made.state


def test_equal_statements_reach_equal_states(tmp_path: Path, shop: Cluster) -> None:
    """Object ids and transaction ids of another clone do not affect the digest."""
    statements = (
        "CREATE TABLE made (a serial, b text, c timestamptz)",
        "INSERT INTO made (b) SELECT 'row ' || n FROM generate_series(1, 9) n",
        "UPDATE made SET b = b || '!' WHERE a > 3", "DELETE FROM made WHERE a = 2", "SELECT sell(3, 4)",
    )  # fmt: skip
    one, two = (responses_to(tmp_path, shop, *statements) for _ in range(2))
    assert [a.state for a in one] == [a.state for a in two]
    assert len({a.state for a in one}) == len(statements)


def test_large_tables_are_digested_by_changes(tmp_path: Path, cluster: Cluster) -> None:
    """Equal changes of a large table give equal states, and other changes give others."""
    script = "CREATE TABLE big AS SELECT n AS id, repeat('x', 100) AS t FROM generate_series(1, 20000) n"
    cluster.create("large", script)

    async def test(driver: PostgresDriver) -> None:
        states = []
        for text in ("y", "y", "z"):
            sandbox = await driver.start(cluster.spec("large"))
            update = f"UPDATE big SET t = '{text}' WHERE id = 7"
            states.append((await ask(sandbox, update, database="large")).state)
            same = await ask(sandbox, "UPDATE big SET t = 'q' WHERE id = -7", database="large")
            assert (same.effect, same.state) == (NONE, states[-1])
        assert states[0] == states[1] != states[2]

    driven(tmp_path, test)


def test_restored_sandboxes_are_independent(tmp_path: Path, shop: Cluster) -> None:
    """Two restored sandboxes write without affecting each other, and `lastval` is restored."""

    async def test(driver: PostgresDriver) -> None:
        spec = shop.spec("shop")
        sandbox = await driver.start(spec)
        await ask(sandbox, "INSERT INTO sale (item, amount) VALUES (1, 1)")
        frozen = await sandbox.freeze()
        assert frozen.state == (await ask(sandbox, "SELECT 1")).state
        await ask(sandbox, "DELETE FROM sale")
        one, two = await driver.restore(spec, frozen), await driver.restore(spec, frozen)
        assert (await ask(one, "SELECT count(*) FROM sale")).value == 21
        # `lastval` is part of the state.
        assert (await ask(two, "SELECT lastval()")).value == 21
        assert (await ask(two, "INSERT INTO sale (item, amount) VALUES (1, 1) RETURNING id")).value == 22
        assert (await ask(one, "SELECT count(*) FROM sale")).value == 21
        again = await driver.restore(spec, await two.freeze())
        assert (await ask(again, "SELECT max(id) FROM sale")).value == 22
        assert (await ask(sandbox, "SELECT count(*) FROM sale")).value == 0

    driven(tmp_path, test)


def test_collect_drops_unneeded_states(tmp_path: Path, shop: Cluster) -> None:
    """A dropped state cannot be restored, and a kept one can."""

    async def test(driver: PostgresDriver) -> None:
        spec = shop.spec("shop")
        sandbox = await driver.start(spec)
        states: list[FrozenState] = []
        for number in (901, 902):
            await ask(sandbox, f"INSERT INTO item (id, name) VALUES ({number}, 'x')")
            states.append(await sandbox.freeze())
        await sandbox.close()
        assert await driver.collect(states[0].parts) > 0
        assert (await ask(await driver.restore(spec, states[0]), "SELECT count(*) FROM item")).value == 51
        with pytest.raises(StateGoneError):
            await driver.restore(spec, states[1])

    driven(tmp_path, test)


def test_only_templates_remain_on_the_server(tmp_path: Path, shop: Cluster) -> None:
    """After a close, only the agents' role and the templates exist."""
    prefix = ""

    async def test(driver: PostgresDriver) -> None:
        nonlocal prefix
        sandbox = await driver.start(shop.spec("shop"))
        await ask(sandbox, "DELETE FROM sale")
        await sandbox.freeze()
        prefix = next(iter(driver._servers.values())).prefix

    driven(tmp_path, test, spares=2)
    kinds = sorted(name.removeprefix(prefix).split("_")[1] for name in shop.ours() if name.startswith(prefix))
    assert kinds == ["agent", "root", "state"]


KILLED = """
import asyncio, sys, orjson
from pathlib import Path
from sandboxes.postgres.driver import PostgresDriver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.sql_calls import ask

async def main():
    driver = PostgresDriver(Path(sys.argv[1]))
    await driver.open()
    sandbox = await driver.start(EnvironmentSpec.model_validate_json(sys.argv[2]))
    await ask(sandbox, "DELETE FROM sale")
    frozen = await sandbox.freeze()
    await ask(sandbox, "DELETE FROM item CASCADE")
    await driver.clones.idle()
    print(orjson.dumps(frozen.payload).decode(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_next_start_cleans_up_after_a_kill(tmp_path: Path, shop: Cluster) -> None:
    """Clones of a killed instance are dropped, and its frozen states can be restored."""
    spec = shop.spec("shop")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "postgres"), spec.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        payload = orjson.loads(process.stdout.readline())
        process.kill()
    assert any("_fork_" in name or "_spare_" in name for name in shop.ours())

    async def test(driver: PostgresDriver) -> None:
        kinds = {name.split("_")[2] for name in await driver._server(shop.dsn).databases()}
        assert kinds == {"root", "state"}
        frozen = FrozenState("postgres", "files", payload, 0, None)
        restored = await driver.restore(spec, frozen)
        assert (await ask(restored, "SELECT count(*) FROM sale")).value == 0
        assert (await ask(restored, "SELECT count(*) FROM item")).value == 50

    driven(tmp_path, test)


def test_source_never_changes(tmp_path: Path, shop: Cluster) -> None:
    """Neither rows nor sequences of the source change."""
    with shop.connect("shop") as connection:
        before = connection.execute("SELECT count(*), sum(amount) FROM sale").fetchall()
    responses_to(tmp_path, shop, "DELETE FROM sale", "DROP TABLE item CASCADE", "SELECT nextval('sale_id_seq')")
    with shop.connect("shop") as connection:
        assert connection.execute("SELECT count(*), sum(amount) FROM sale").fetchall() == before
        assert connection.execute("SELECT last_value FROM sale_id_seq").fetchall() == [(20,)]
        assert connection.execute("SELECT count(*) FROM item").fetchall() == [(50,)]


def test_identity_follows_the_content(tmp_path: Path, shop: Cluster) -> None:
    """Databases with equal content have one identity, until one of them changes."""
    shop.create("twin")

    async def test(driver: PostgresDriver) -> None:
        def named(source: str) -> EnvironmentSpec:
            database = Database(dsn=shop.dsn, source=source)
            return EnvironmentSpec(driver="postgres", databases={"shop": database})

        first = await driver.identity(named("shop"))
        assert await driver.identity(named("twin")) == first
        with shop.connect("twin") as connection:
            connection.execute("UPDATE item SET stock = stock + 1 WHERE id = 1")
        assert await driver.identity(named("twin")) != first
        assert await driver.identity(named("shop")) == first

    driven(tmp_path, test)


def test_uncounted_changes_change_the_identity(tmp_path: Path, shop: Cluster) -> None:
    """The server counts a session's changes late, so open sessions are part of the fingerprint."""
    shop.create("busy")

    async def test(driver: PostgresDriver) -> None:
        spec = EnvironmentSpec(driver="postgres", databases={"shop": Database(dsn=shop.dsn, source="busy")})
        first = await driver.identity(spec)
        with shop.connect("busy") as connection:
            # The server reports at most once a second, so the second statement is not counted yet.
            connection.execute("SELECT 1")
            connection.execute("UPDATE item SET stock = stock + 1 WHERE id = 1")
            with pytest.raises(SpecError, match="has other sessions"):
                await driver.identity(spec)
        assert await driver.identity(spec) != first

    driven(tmp_path, test)


def test_volatile_results_are_not_shared(tmp_path: Path, shop: Cluster) -> None:
    """The clock and random numbers are private, unless the spec says `once`."""
    statements = ("SELECT now()", "SELECT random()", "SELECT gen_random_uuid()", "SELECT 1", "SELECT 'now' AS word")
    shareable = [a.shareable for a in responses_to(tmp_path, shop, *statements)]
    assert shareable == [False, False, False, True, False]
    once = responses_to(tmp_path, shop, *statements, volatile="once")
    assert all(a.shareable for a in once)
    assert [not a.volatile for a in once] == shareable


@pytest.mark.parametrize(
    ("statement", "param"),
    [
        ("SELECT $1::timestamptz", "now"),
        ("SELECT $1::date", {"date": "\ttoday"}),
        ("SELECT query_to_xml($1, true, true, '')", "select now()"),
    ],
)
def test_parameters_are_a_part_of_the_statement(tmp_path: Path, shop: Cluster, statement: str, param: object) -> None:
    """The server reads some as the time, and runs others."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        answer = await ask(sandbox, statement, params=[param])
        assert (answer.error, answer.shareable) == (None, False)

    driven(tmp_path, test)


def test_settings_in_parameters_are_seen(tmp_path: Path, shop: Cluster) -> None:
    """A query in a parameter changes the session, so its rollout no longer stands where others do."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        before = await ask(sandbox, "DELETE FROM sale WHERE id = 1")
        query = "select set_config('app.who', 'me', false)"
        answer = await ask(sandbox, "SELECT query_to_xml($1, true, true, '')", params=[query])
        assert (answer.state, answer.witness) != (before.state, before.witness)

    driven(tmp_path, test)


def test_volatility_is_detected_through_definitions(tmp_path: Path, cluster: Cluster) -> None:
    """Functions, views and defaults that read the clock are followed."""
    cluster.create(
        "hidden",
        "CREATE FUNCTION inner_one() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()';"
        "CREATE FUNCTION outer_one() RETURNS timestamptz LANGUAGE sql AS 'SELECT inner_one()';"
        "CREATE VIEW latest AS SELECT outer_one() AS at;"
        "CREATE TABLE log (id serial, at timestamptz DEFAULT now(), note text);"
        'CREATE VIEW "Latest of All" AS SELECT now() AS at;'
        "CREATE DOMAIN moment AS timestamptz DEFAULT now(); CREATE TABLE seen (id int, at moment);"
        "CREATE FUNCTION differs(int, int) RETURNS bool LANGUAGE sql AS 'SELECT $1 < extract(epoch FROM now())';"
        "CREATE OPERATOR <~> (FUNCTION = differs, LEFTARG = int, RIGHTARG = int);"
        "CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.at := now(); RETURN NEW; END';"
        "CREATE TABLE parts (id int, at timestamptz) PARTITION BY LIST (id);"
        "CREATE TABLE part PARTITION OF parts FOR VALUES IN (1);"
        "CREATE TRIGGER stamp BEFORE INSERT ON part FOR EACH ROW EXECUTE FUNCTION stamp();"
        "CREATE TABLE parent (id int PRIMARY KEY);"
        "CREATE TABLE child (id int REFERENCES parent ON DELETE SET NULL, at timestamptz);"
        "CREATE TRIGGER stamp BEFORE UPDATE ON child FOR EACH ROW EXECUTE FUNCTION stamp();"
        "CREATE TABLE hidden (until timestamptz); CREATE POLICY p ON hidden USING (until > now());"
        "ALTER TABLE hidden ENABLE ROW LEVEL SECURITY; ALTER TABLE hidden FORCE ROW LEVEL SECURITY;"
        "CREATE FUNCTION parsed() RETURNS timestamptz LANGUAGE sql RETURN now();"
        "CREATE FUNCTION given(at timestamptz DEFAULT now()) RETURNS timestamptz LANGUAGE sql AS 'SELECT at';"
        "CREATE FUNCTION add(int, int) RETURNS int LANGUAGE sql AS 'SELECT $1 + $2 + (100 * random())::int';"
        "CREATE AGGREGATE total(int) (SFUNC = add, STYPE = int);"
        "CREATE TYPE pair AS (x int, y float); CREATE EXTENSION pgcrypto;"
        "CREATE FUNCTION paired(int) RETURNS pair LANGUAGE sql AS 'SELECT ($1, random())::pair';"
        "CREATE CAST (int AS pair) WITH FUNCTION paired(int)",
    )

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(cluster.spec("hidden"))
        statements = (
            "SELECT outer_one()",
            "SELECT * FROM latest",
            "SELECT note FROM log",
            "INSERT INTO log (note) VALUES ('x')",
            'SELECT * FROM "Latest of All"',
            "INSERT INTO seen (id) VALUES (1)",
            "SELECT 1 <~> 2",
            "INSERT INTO parts (id) VALUES (1)",
            "DELETE FROM parent",
            "SELECT * FROM hidden",
            "SELECT parsed()",
            "SELECT given()",
            "SELECT total(1)",
            "SELECT (1::pair).y",
            "SELECT gen_salt('md5')",
            "SELECT crypt('word', 'salt')",
        )
        shareable = [(await ask(sandbox, statement, database="hidden")).shareable for statement in statements]
        assert shareable == [False, False, True, *[False] * 12, True]

    driven(tmp_path, test)


def test_timeouts_are_results_but_not_shared(tmp_path: Path, shop: Cluster) -> None:
    """The statement is cancelled, its changes are rolled back, and the sandbox continues."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        endless = "WITH RECURSIVE r AS (SELECT 1 UNION ALL SELECT 1 FROM r) SELECT count(*) FROM r"
        for statement in ("SELECT pg_sleep(60)", endless, "DELETE FROM sale WHERE pg_sleep(60) IS NULL"):
            answer = await ask(sandbox, statement, timeout_s=0.3)
            assert answer.error is not None
            assert (answer.error["kind"], answer.shareable, answer.effect) == ("timeout", False, NONE)
        assert (await ask(sandbox, "SELECT count(*) FROM sale")).value == 20

    driven(tmp_path, test)


def test_uncancellable_statement_is_terminated(tmp_path: Path, shop: Cluster) -> None:
    """A statement that catches the cancellation is ended with its session."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        again = "BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN NULL; END"
        stubborn = f"DO $$ BEGIN LOOP {again}; END LOOP; END $$"
        answer = await ask(sandbox, stubborn, timeout_s=0.2)
        assert answer.error is not None
        assert (answer.error["kind"], answer.shareable) == ("timeout", False)
        with shop.connect() as connection:
            for _ in range(600):
                busy = connection.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE query ~ 'query_canceled' AND state = 'active' "
                    "AND datname <> 'postgres'"
                )
                if busy.fetchall() == [(0,)]:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError("the statement still runs")

    driven(tmp_path, test)


def test_results_are_limited(tmp_path: Path, shop: Cluster) -> None:
    """Rows, bytes and memory of a result have limits."""

    async def test(driver: PostgresDriver) -> None:
        spec = shop.spec("shop", limits={"memory_mb": 64, "output_bytes": 10_000})
        sandbox = await driver.start(spec)
        few = await ask(sandbox, "SELECT id FROM item ORDER BY id", max_rows=3)
        assert (few.rows, few.body["truncated"]) == ([[1], [2], [3]], True)
        wide = await ask(sandbox, "SELECT repeat('x', 900) FROM generate_series(1, 1000)", max_rows=1000)
        assert wide.body["truncated"]
        assert 5 < len(wide.rows) < 12
        many = await ask(sandbox, "SELECT n FROM generate_series(1, 2000000) n")
        assert (len(many.rows), many.body["truncated"]) == (100, True)
        one = await ask(sandbox, "SELECT repeat('x', 200000000)", timeout_s=20.0)
        assert one.error is not None
        assert (one.error["kind"], one.shareable) == ("limit", False)
        assert (await ask(sandbox, "SELECT 1")).value == 1

    driven(tmp_path, test)


def test_values_keep_their_precision(tmp_path: Path, shop: Cluster) -> None:
    """Values that JSON lacks are tagged."""
    (answer,) = responses_to(
        tmp_path, shop,
        "SELECT 9223372036854775807, 1.10::numeric, 'NaN'::float8, '-Infinity'::float4, 0.1::float8, '\\x00ff'::bytea, "
        "date '2026-01-02', 'infinity'::timestamp, '1 day'::interval, true, NULL, '{\"a\": 1}'::jsonb, ARRAY[1, 2], "
        "'é'",
    )  # fmt: skip
    assert answer.rows == [[
        9223372036854775807, {"decimal": "1.10"}, {"float": "nan"}, {"float": "-inf"}, 0.1, {"base64": "AP8="},
        {"date": "2026-01-02"}, {"timestamp": "infinity"}, {"interval": "1 day"}, True, None, {"json": '{"a": 1}'},
        "{1,2}", "é",
    ]]  # fmt: skip
    assert answer.body["types"][:3] == ["bigint", "numeric", "double precision"]


def test_tools_beyond_query(tmp_path: Path, shop: Cluster) -> None:
    """`tables`, `schema` and `explain` read, and `script` is atomic."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        tables = await ask(sandbox, tool="tables")
        assert tables.rows == [["public", "dear", "view"], ["public", "item", "table"], ["public", "sale", "table"]]
        schema = await ask(sandbox, tool="schema", table="sale")
        assert [row[2] for row in schema.rows] == ["id", "item", "amount"]
        assert "REFERENCES" in schema.rows[1][6]
        assert "no table" in (await ask(sandbox, tool="schema", table="missing")).message
        plan = await ask(sandbox, "SELECT * FROM item", tool="explain")
        assert "Seq Scan" in plan.rows[0][0]
        assert (await ask(sandbox, "SELECT $1::int + $2", params=[40, 2])).value == 42
        assert "numbered" in (await ask(sandbox, "SELECT 1", params={"a": 1})).message
        assert all(position.clone is None for position in sandbox.positions.values())
        both = await ask(sandbox, "DELETE FROM sale; INSERT INTO item (id, name) VALUES (70, 'x')", tool="script")
        assert (both.error, both.effect) == (None, DATABASE)
        half = await ask(sandbox, "INSERT INTO item (id, name) VALUES (71, 'x'); SELECT 1/0", tool="script")
        assert (half.effect, (await ask(sandbox, "SELECT max(id) FROM item")).value) == (NONE, 70)
        plan = await ask(sandbox, "DELETE FROM item", tool="explain")
        assert (plan.error, plan.effect) == (None, NONE)

    driven(tmp_path, test)


def test_compare_changes_nothing(tmp_path: Path, shop: Cluster) -> None:
    """Numbers are equal in every notation, and writing statements are refused."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))

        async def match(sql: str, gold: str, **more: Any) -> Any:
            answer = await ask(sandbox, sql, tool="compare", gold=gold, **more)
            assert answer.effect is NONE
            return answer.body["match"]

        assert await match("SELECT id FROM item ORDER BY id DESC", "SELECT id FROM item")
        assert not await match("SELECT id FROM item ORDER BY id DESC", "SELECT id FROM item ORDER BY id", ordered=True)
        assert await match("SELECT 1.0, 0.1::float8", "SELECT 1, 0.10")
        assert not await match("SELECT id FROM item UNION ALL SELECT 1", "SELECT id FROM item")
        assert not await match("SELECT id, id FROM item", "SELECT id FROM item")
        assert not await match("SELECT missing FROM item", "SELECT id FROM item")
        refused = await ask(sandbox, "DELETE FROM item RETURNING id", tool="compare", gold="SELECT 1")
        assert refused.error is not None
        assert (refused.error["kind"], refused.effect) == ("refused", NONE)

    driven(tmp_path, test)


def test_sandboxes_share_no_locks(tmp_path: Path, shop: Cluster) -> None:
    """Advisory locks of one sandbox do not block another."""

    async def test(driver: PostgresDriver) -> None:
        one, two = [await driver.start(shop.spec("shop")) for _ in range(2)]
        for sandbox in (one, two):
            assert (await ask(sandbox, "SELECT pg_try_advisory_lock(7)")).value is True

    driven(tmp_path, test)


def test_killed_worker_kills_its_sandbox_only(tmp_path: Path, shop: Cluster) -> None:
    """The private clone's session is lost, so the sandbox is dead; a new one works."""

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(shop.spec("shop"))
        await ask(sandbox, "DELETE FROM sale")
        clone = sandbox.positions["shop"].clone
        assert clone is not None
        os.kill(clone.worker.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await ask(sandbox, "SELECT count(*) FROM sale")
        assert not sandbox.alive
        other = await driver.start(shop.spec("shop"))
        assert (await ask(other, "SELECT count(*) FROM sale")).value == 20

    driven(tmp_path, test)


@pytest.mark.parametrize(
    ("dsn", "source", "reason"),
    [
        ("host=127.0.0.1 port=1 user=postgres", "shop", "cannot be reached"),
        ("{dsn}", "missing", "no database 'missing'"),
        ("{dsn} password=wrong", "shop", "cannot be reached"),
        ("nonsense", "shop", "cannot be"),
    ],
)
def test_unusable_specs_are_reported(tmp_path: Path, shop: Cluster, dsn: str, source: str, reason: str) -> None:
    """The error names the problem, and never the password."""

    async def test(driver: PostgresDriver) -> None:
        spec = EnvironmentSpec(
            driver="postgres", databases={"shop": Database(dsn=dsn.format(dsn=shop.dsn), source=source)}
        )
        with pytest.raises(SpecError, match=reason) as raised:
            await driver.identity(spec)
        assert "administrator" not in str(raised.value)

    driven(tmp_path, test)


def test_source_in_use_is_reported(tmp_path: Path, shop: Cluster) -> None:
    """PostgreSQL cannot clone a database that has sessions."""

    async def test(driver: PostgresDriver) -> None:
        with shop.connect("shop"), pytest.raises(SpecError, match="has other sessions"):
            await driver.start(shop.spec("shop"))

    driven(tmp_path, test)


def test_spare_clones_are_used_and_replaced(tmp_path: Path, shop: Cluster) -> None:
    """A spare whose worker was killed is dropped and replaced."""

    async def test(driver: PostgresDriver) -> None:
        sandboxes = [await driver.start(shop.spec("shop")) for _ in range(3)]
        await driver.clones.idle()
        (template,) = driver._templates.values()
        waiting = list(template.spares)
        assert len(waiting) == 1
        # A spare whose worker was killed must not be used.
        os.kill(waiting[0].worker.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not waiting[0].worker.alive, "its end is not noticed")
        await ask(sandboxes[0], "DELETE FROM sale WHERE id = 1")
        await driver.clones.idle()
        (ready,) = template.spares
        await ask(sandboxes[1], "DELETE FROM sale WHERE id = 2")
        clone = sandboxes[1].positions["shop"].clone
        assert clone is ready
        assert (await ask(sandboxes[2], "SELECT count(*) FROM sale")).value == 20
        assert waiting[0].database not in shop.ours()

    driven(tmp_path, test, spares=1)


def test_several_databases_are_one_state(tmp_path: Path, shop: Cluster) -> None:
    """A state covers all databases of the sandbox, and restores all of them."""
    shop.create("stock", SHOP)

    async def test(driver: PostgresDriver) -> None:
        spec = shop.spec("shop", "stock")
        sandbox = await driver.start(spec)
        start = (await ask(sandbox, "SELECT 1")).state
        moved = await ask(sandbox, "DELETE FROM sale", database="stock")
        assert (await ask(sandbox, "SELECT count(*) FROM sale")).value == 20
        assert moved.state != start
        restored = await driver.restore(spec, await sandbox.freeze())
        assert (await ask(restored, "SELECT count(*) FROM sale", database="stock")).value == 0

    driven(tmp_path, test)


SEQUENCE_USES = {
    "nothing": "SELECT 1",
    "setval": "SELECT setval('sale_id_seq', 40)",
    "setval to the value that it has": "SELECT setval('sale_id_seq', 20)",
    "the next value set": "SELECT setval('sale_id_seq', 40, false)",
    "two sequences": "CREATE SEQUENCE other; SELECT nextval('other'); SELECT nextval('sale_id_seq')",
    "another one set": "CREATE SEQUENCE a; SELECT nextval('sale_id_seq'); SELECT setval('a', 21)",
    "a quoted name": 'CREATE SEQUENCE "Odd Name"; SELECT nextval(\'"Odd Name"\')',
    "a cache": "CREATE SEQUENCE a CACHE 7; SELECT nextval('a'); SELECT nextval('a')",
    "restarted elsewhere": "ALTER SEQUENCE sale_id_seq RESTART WITH 77",
    "truncated": "INSERT INTO sale (item, amount) VALUES (1, 1); TRUNCATE sale RESTART IDENTITY",
    "dropped": "SELECT nextval('sale_id_seq'); DROP TABLE sale CASCADE",
    "at its end": "CREATE SEQUENCE a MAXVALUE 1; SELECT nextval('a')",
}
"""Statements that leave different values in `currval` and `lastval`, or different next values."""
SEQUENCE_LOOKS = (
    "SELECT lastval()", "SELECT currval('sale_id_seq')", "SELECT currval('other')", "SELECT currval('a')",
    "SELECT currval('b')", "SELECT setval('b', 9)", "SELECT lastval()", "SELECT nextval('sale_id_seq')",
    "SELECT nextval('a')", "SELECT lastval()",
)  # fmt: skip


def plain_values(shop: Cluster, statements: list[str]) -> list[Any]:
    """Return the value or SQLSTATE of each statement in one session of plain PostgreSQL."""
    shop.create("plain")
    values: list[Any] = []
    with shop.connect("plain") as connection:
        for statement in statements:
            try:
                cursor = connection.execute(statement)
                values.append(cursor.fetchone()[0] if cursor.description else None)  # type: ignore[index]
            except psycopg.Error as error:
                values.append(error.sqlstate)
    return values


def test_restored_sandbox_knows_sequences_as_before(tmp_path: Path, shop: Cluster) -> None:
    """What a session knows of sequences is restored as plain PostgreSQL has it, or the state is not kept."""

    async def test(driver: PostgresDriver) -> None:
        spec, kept = shop.spec("shop"), set()
        for name, use in SEQUENCE_USES.items():
            statements = use.split("; ")
            sandbox = await driver.start(spec)
            for statement in statements:
                await ask(sandbox, statement)
            with contextlib.suppress(NotFreezableError):
                sandbox = await driver.restore(spec, await sandbox.freeze())
                kept.add(name)
            answers = [await ask(sandbox, statement) for statement in SEQUENCE_LOOKS]
            values = [answer.error["code"] if answer.error else answer.value for answer in answers]
            plain = await asyncio.to_thread(plain_values, shop, [*statements, *SEQUENCE_LOOKS])
            assert values == plain[len(statements) :], name
            await sandbox.close()
        assert SEQUENCE_USES.keys() - kept == {"another one set", "a cache", "truncated"}

    driven(tmp_path, test)


def test_uses_of_sequences_are_different_states(tmp_path: Path, shop: Cluster) -> None:
    """A value that only the session knows, or a next value that no catalog shows, makes a state of its own."""
    uses = ("nothing", "setval", "setval to the value that it has", "the next value set", "restarted elsewhere")

    async def test(driver: PostgresDriver) -> None:
        states = set()
        for use in uses:
            sandbox = await driver.start(shop.spec("shop"))
            answer = await ask(sandbox, SEQUENCE_USES[use])
            assert (answer.effect == NONE) == (use == "nothing"), use
            states.add(answer.state)
        assert len(states) == len(uses)

    driven(tmp_path, test)
