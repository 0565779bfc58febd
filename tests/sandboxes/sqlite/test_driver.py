"""The `sqlite` driver: reads, changes, forbidden statements, kills, sources and states."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.spec import Database, EnvironmentSpec, Limits
from sandboxes.sqlite.driver import SqliteDriver
from tests.machine import wait_until
from tests.sandboxes.box import opened
from tests.sandboxes.damaged_files import flip
from tests.sandboxes.sql_calls import ask
from tests.sandboxes.sqlite_files import SHOP, driven, folder_digest, forks, make, responses_to, spec_of

if TYPE_CHECKING:
    from sandboxes.driver import FrozenState

NONE, DATABASE, SESSION = Effect.NONE, Effect.DATABASE, Effect.SESSION
WIDE = (
    SHOP
    + """
CREATE VIRTUAL TABLE words USING fts5(text);
CREATE VIRTUAL TABLE old_words USING fts4(text);
CREATE VIRTUAL TABLE boxes USING rtree(id, low, high);
INSERT INTO words VALUES ('hello world');
INSERT INTO old_words VALUES ('hello world');
INSERT INTO boxes VALUES (1, 2, 3);
CREATE TABLE noted (at TEXT DEFAULT CURRENT_TIMESTAMP, lot INT DEFAULT (abs(random())), what TEXT);
CREATE VIEW today AS SELECT date('now') AS day;
CREATE TRIGGER noted_item AFTER DELETE ON item BEGIN INSERT INTO noted (what) VALUES ('deleted'); END;
"""
)

READS = (
    "SELECT 1", "SELECT * FROM item WHERE id < 3", "SELECT * FROM few", "VALUES (1), (2)", "-- nothing\nSELECT 1",
    "WITH x AS (SELECT id FROM item) SELECT count(*) FROM x", "EXPLAIN SELECT * FROM item", "SELECT * FROM missing",
    "EXPLAIN INSERT INTO item (name) VALUES ('x')", "EXPLAIN QUERY PLAN DELETE FROM item", "SELEC 1", "", ";",
    "SELECT * FROM sqlite_schema", "SELECT * FROM pragma_table_info('item')", "SELECT * FROM json_each('[1, 2]')",
    "SELECT text FROM words WHERE words MATCH 'hello'", "SELECT text FROM old_words WHERE old_words MATCH 'hello'",
    "SELECT * FROM boxes WHERE low > 1", "SELECT sum(ncell) FROM dbstat", "PRAGMA table_info(item)",
    "PRAGMA foreign_keys", "PRAGMA integrity_check", "PRAGMA foreign_key_check", "PRAGMA user_version",
    "PRAGMA page_count",
    "PRAGMA index_list(item)", "PRAGMA compile_options", "PRAGMA cache_size", "PRAGMA encoding", "SELECT changes()",
    "SELECT last_insert_rowid()", "SELECT load_extension('/tmp/x')", "SELECT fts3_tokenizer('simple', x'00')",
)  # fmt: skip
"""Statements that shared workers answer, without a fork."""
UNMOVED = (
    "DELETE FROM item WHERE id = 99", "UPDATE item SET id = 1", "INSERT INTO item VALUES (1, 'twice', 0)",
    "INSERT INTO item (id) VALUES (99)", "CREATE TABLE item (a)", "CREATE TABLE IF NOT EXISTS item (a)", "COMMIT",
    "ROLLBACK", "DROP TABLE missing", "DROP TABLE IF EXISTS missing", "RELEASE nothing", "DETACH nothing", "REINDEX",
    "INSERT INTO item SELECT * FROM item WHERE 0", "PRAGMA foreign_keys = OFF", "PRAGMA incremental_vacuum",
    "PRAGMA user_version = 0", "ALTER TABLE item RENAME COLUMN missing TO other", "DELETE FROM few",
)  # fmt: skip
"""Statements that need a fork to run, and change nothing."""
CHANGES = (
    ("INSERT INTO item (name) VALUES ('x')", DATABASE | SESSION),
    ("INSERT INTO item (name) VALUES ('x') RETURNING id", DATABASE | SESSION),
    ("WITH x AS (SELECT 1) DELETE FROM item WHERE id IN (SELECT * FROM x)", DATABASE | SESSION),
    ("REPLACE INTO item VALUES (1, 'one', 1)", DATABASE | SESSION),
    ("UPDATE item SET name = name", SESSION),
    ("CREATE TABLE other (a)", DATABASE),
    ("CREATE TABLE other AS SELECT * FROM item", DATABASE),
    ("CREATE INDEX by_name ON item (name)", DATABASE),
    ("CREATE VIEW v AS SELECT 1", DATABASE),
    ("DROP VIEW few", DATABASE),
    ("ALTER TABLE item ADD COLUMN more", DATABASE),
    ("ANALYZE", DATABASE),
    ("VACUUM", DATABASE | SESSION),
    ("INSERT INTO words VALUES ('more')", DATABASE | SESSION),
    ("INSERT INTO words (words) VALUES ('optimize')", SESSION),
    ("PRAGMA user_version = 3", DATABASE),
    ("PRAGMA application_id = 3", DATABASE),
    ("PRAGMA foreign_keys = ON", SESSION),
    ("PRAGMA case_sensitive_like = ON", SESSION),
    ("PRAGMA query_only = 1", SESSION),
    ("BEGIN", SESSION),
    ("SAVEPOINT s", SESSION),
    ("ATTACH ':memory:' AS aside", SESSION),
    ("CREATE TEMP TABLE t (a)", SESSION),
    ("CREATE TEMP VIEW t AS SELECT 1", SESSION),
)
REFUSED = (
    "ATTACH '/etc/passwd' AS p", "ATTACH 'new.db' AS p", "ATTACH 'file:/tmp/x?mode=memory' AS p",
    "VACUUM INTO '/tmp/forkpoint-copy.db'", "VACUUM INTO 'copy.db'", "PRAGMA journal_mode = DELETE",
    "PRAGMA journal_mode", "PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA writable_schema = 1",
    "PRAGMA temp_store_directory = '/tmp'", "PRAGMA data_store_directory = '/tmp'", "PRAGMA mmap_size = 1000000",
    "PRAGMA schema_version = 7", "PRAGMA page_size = 8192", "PRAGMA auto_vacuum = 1", "PRAGMA encoding = 'UTF-16'",
    "PRAGMA database_list", "SELECT * FROM pragma_database_list", "PRAGMA wal_autocheckpoint = 1",
    "PRAGMA hard_heap_limit = 1", "PRAGMA shrink_memory", "PRAGMA optimize",
    "PRAGMA trusted_nonsense", "SELECT load_extension('/tmp/x')",
    "SELECT * FROM sqlite_stmt", "SELECT fts3_tokenizer('simple')",
)  # fmt: skip


def test_reads_make_no_fork(tmp_path: Path) -> None:
    """Every statement of `READS` runs on shared workers."""

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db", WIDE)))
        states = {}
        for sql in READS:
            answer = await ask(sandbox, sql)
            states[sql] = answer.state, answer.effect, forks(driver)
        assert set(states.values()) == {(answer.state, NONE, 0)}, states

    driven(tmp_path, test)


def test_ineffective_statements_leave_no_fork(tmp_path: Path) -> None:
    """Every statement of `UNMOVED` needs a fork to run, and the fork is dropped afterwards."""

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db", WIDE)))
        before = (await ask(sandbox, "SELECT 1")).state
        for sql in UNMOVED:
            answer = await ask(sandbox, sql)
            assert (answer.effect, answer.state, forks(driver)) == (NONE, before, 0), sql
        assert len(driver.worker_pool.workers) <= 2

    driven(tmp_path, test)


@pytest.mark.parametrize(("sql", "effect"), CHANGES)
def test_changes_have_their_effect(tmp_path: Path, sql: str, effect: Effect) -> None:
    """Changes of content and of session state are distinguished."""
    (answer,) = responses_to(tmp_path, sql, script=WIDE)
    assert (answer.error, answer.effect) == (None, effect)
    assert (answer.state is None) == (sql.split(maxsplit=1)[0] in ("BEGIN", "SAVEPOINT", "ATTACH") or "TEMP" in sql)


def test_forbidden_statements_are_refused(tmp_path: Path) -> None:
    """They are refused on shared connections, on forks and in transactions, with a reason."""

    async def test(driver: SqliteDriver) -> None:
        for statements in ((), ("BEGIN",), ("INSERT INTO item (name) VALUES ('x')",)):
            sandbox = await driver.start(spec_of(make(tmp_path / f"{len(statements)}{statements[:1]}.db")))
            for sql in statements:
                await ask(sandbox, sql)
            for sql in REFUSED:
                answer = await ask(sandbox, sql)
                assert answer.error is not None, sql
                if "within a transaction" not in answer.message:
                    assert answer.error["kind"] == "refused", (sql, answer.error)
                    assert "not available" in answer.message or "databases" in answer.message
                assert (answer.effect, answer.shareable) == (NONE, True), sql
            assert (await ask(sandbox, "SELECT count(*) > 0 FROM item")).value == 1

    driven(tmp_path, test)


def test_results_contain_no_machine_paths(tmp_path: Path) -> None:
    """Results are shared between machines, so they must not name files."""
    source = make(tmp_path / "s.db")

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(source))
        answers = [await ask(sandbox, sql) for sql in (*READS, *REFUSED, *UNMOVED)]
        assert str(tmp_path) not in str([answer.body for answer in answers])

    driven(tmp_path, test)


HOSTILE = (
    "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n",
    "SELECT length(replace(hex(zeroblob(200000000)), '0', 'ab'))",
    "SELECT count(*) FROM item a, item b, item c, item d, item e, item f",
    "SELECT printf('%.*c', 900000000, 'x')",
    "SELECT hex(randomblob(1000000000))",
    "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT k FROM n ORDER BY random()",
    "SELECT group_concat(x, x) FROM (SELECT hex(zeroblob(4000000)) AS x FROM item)",
    "SELECT 'a' LIKE '" + "%a" * 2000 + "'",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT " + "+".join(["1"] * 20_000),
    "SELECT " + ",".join(["1"] * 5000),
    "SELECT 'x" + "y" * (1 << 20) + "'",
    "CREATE TABLE big AS WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT zeroblob(900000) FROM n",
    "INSERT INTO item (name) WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT hex(k) FROM n",
    "SELECT json_group_array(hex(zeroblob(1000000))) FROM item a, item b",
)


def test_hostile_statements_harm_only_themselves(tmp_path: Path) -> None:
    """Endless, huge and deeply nested statements fail within their limits, and others continue."""

    async def test(driver: SqliteDriver) -> None:
        limits = Limits(memory_mb=64, disk_mb=16)
        spec = spec_of(make(tmp_path / "s.db"), limits=limits)
        sandbox, other = await driver.start(spec), await driver.start(spec)
        before = (await ask(sandbox, "SELECT count(*) FROM item")).state
        for sql in HOSTILE:
            began = time.monotonic()
            hostile = asyncio.ensure_future(ask(sandbox, sql, timeout_s=0.5))
            assert (await ask(other, "SELECT count(*) FROM item")).value == 50
            answer = await hostile
            assert (answer.effect, answer.state) == (NONE, before), sql[:80]
            assert time.monotonic() - began < 20, sql[:80]
            if answer.error is not None and answer.error["kind"] in ("timeout", "limit"):
                assert not answer.shareable or answer.error["code"] == "SQLITE_TOOBIG"
        assert (await ask(sandbox, "SELECT count(*) FROM item")).value == 50
        assert forks(driver) == 0

    driven(tmp_path, test)


def test_out_of_memory_is_a_limit(tmp_path: Path) -> None:
    """Running out of memory is a result of the kind `limit`, and is not shared."""
    greedy = "SELECT count(*) FROM (SELECT DISTINCT hex(zeroblob(100000)) || k FROM "
    greedy += "(WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT k FROM n))"

    async def test(driver: SqliteDriver) -> None:
        limits = Limits(memory_mb=32, disk_mb=4096)
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db"), limits=limits))
        assert (await ask(sandbox, "PRAGMA cache_size = -1000000")).error is None
        answer = await ask(sandbox, greedy, timeout_s=5)
        assert answer.error is not None
        assert answer.error["kind"] in ("limit", "timeout")
        assert not answer.shareable

    driven(tmp_path, test)


def test_killed_idle_workers_are_replaced(tmp_path: Path) -> None:
    """Workers without session state are replaced, and the agent does not notice."""

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db")))
        for sql in ("SELECT count(*) FROM item", "DELETE FROM item WHERE id = 1", "SELECT count(*) FROM item"):
            before = await ask(sandbox, sql)
            for worker in list(driver.worker_pool.workers):
                os.kill(worker.pid, signal.SIGKILL)
        after = await ask(sandbox, "SELECT count(*) FROM item")
        assert (after.value, after.state) == (49, before.state)

    driven(tmp_path, test)


def kill_writer(driver: SqliteDriver) -> None:
    """Kill the worker that has used 0.1 s of CPU, which only a long statement does, and wait until that is noticed."""

    def busy() -> list[int]:
        return [worker.pid for worker in list(driver.worker_pool.workers) if cpu_ticks(worker.pid) >= 10]

    wait_until(lambda: bool(busy()), "no worker runs a long statement")
    killed = set(busy())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    # Only these: the worker that runs the statement again may be as busy before this is looked at.
    wait_until(
        lambda: killed.isdisjoint(worker.pid for worker in list(driver.worker_pool.workers)),
        "the killed worker still counts",
    )


def cpu_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def test_killed_write_leaves_the_earlier_state(tmp_path: Path) -> None:
    """A write whose worker is killed runs once more. A second kill is a failure of the machine, and no answer."""
    slow = (
        "UPDATE item SET stock = (WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < 30000000) "
    )
    slow += "SELECT count(*) FROM n) WHERE id <= 20"

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db")))
        await ask(sandbox, "DELETE FROM item WHERE id = 50")
        writing = asyncio.ensure_future(ask(sandbox, slow, timeout_s=60))
        for _ in range(2):
            # After the first kill the driver runs the call again.
            await asyncio.to_thread(kill_writer, driver)
        with pytest.raises(SandboxError, match="killed"):
            await writing
        assert (await ask(sandbox, "SELECT count(*), max(stock) FROM item")).rows == [[49, 6]]
        assert (await ask(sandbox, "PRAGMA integrity_check")).value == "ok"

    driven(tmp_path, test)


def test_lost_session_is_an_error(tmp_path: Path) -> None:
    """An open transaction dies with its worker, and the sandbox with it."""

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db")))
        await ask(sandbox, "BEGIN")
        for worker in list(driver.worker_pool.workers):
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await ask(sandbox, "SELECT 1")
        assert not sandbox.alive

    driven(tmp_path, test)


def test_timeout_in_transaction_may_kill_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox stays alive only if the timeout left its transaction intact."""
    # The engine stops the statements itself, however long it waits for a CPU.
    monkeypatch.setattr("sandboxes.workers.pool.GRACE_S", 30.0)

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db")))
        await ask(sandbox, "BEGIN")
        for sql, survives in ((HOSTILE[0], True), (HOSTILE[-2], False)):
            answer = await ask(sandbox, sql, timeout_s=0.2)
            assert answer.error is not None
            assert (answer.error["kind"], answer.effect, answer.shareable) == ("timeout", NONE, False)
            assert sandbox.alive is survives

    driven(tmp_path, test)


def test_slow_rollouts_do_not_block_others(tmp_path: Path) -> None:
    """Endless queries occupy workers, and a short query still gets one."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandboxes = [await driver.start(spec) for _ in range(12)]
        slow = [asyncio.ensure_future(ask(sandbox, HOSTILE[0], timeout_s=60)) for sandbox in sandboxes[1:]]
        await asyncio.sleep(0)
        assert (await ask(sandboxes[0], "SELECT count(*) FROM item")).value == 50
        assert not any(query.done() for query in slow)
        for query in slow:
            query.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert len(driver.worker_pool.workers) <= max(2, os.cpu_count() or 2)

    driven(tmp_path, test)


# -- counters, settings, several databases ---------------------------------------------------------------------------

COUNTERS = "SELECT changes(), last_insert_rowid(), total_changes()"


def test_deferred_foreign_keys_last_until_a_commit(tmp_path: Path) -> None:
    """SQLite switches the deferral off at the next commit. Only the agent's statements may do so."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandbox = await driver.start(spec)
        for statement, left in (("PRAGMA defer_foreign_keys = ON", 1), ("SELECT count(*) FROM item", 0)):
            await ask(sandbox, statement)
            restored = await driver.restore(spec, await sandbox.freeze())
            values = [(await ask(each, "PRAGMA defer_foreign_keys")).value for each in (sandbox, restored)]
            assert values == [left, left]
            if left:
                deferred = await sandbox.freeze()
        # What another rollout at the same state reads does not end it.
        others = [await driver.restore(spec, deferred) for _ in range(2)]
        await ask(others[0], "SELECT count(*) FROM item")
        assert [(await ask(other, "PRAGMA defer_foreign_keys")).value for other in others] == [0, 1]

    driven(tmp_path, test)


def test_failed_statements_may_change_a_session(tmp_path: Path) -> None:
    """One ends the transaction beside a temporary table, and another one keeps the row before its failure."""
    begin = ("CREATE TEMP TABLE mine (a)", "BEGIN", "INSERT OR FAIL INTO item (id, name) VALUES (700, 'a'), (1, 'b')")
    *_, kept, ended, rollback = responses_to(
        tmp_path, *begin, "INSERT OR ROLLBACK INTO item (id) VALUES (1)", "ROLLBACK"
    )
    assert kept.error is not None
    assert kept.effect == ended.effect == SESSION
    assert "no transaction is active" in rollback.message


def test_statistics_that_a_connection_has_not_read_are_session_state(tmp_path: Path) -> None:
    """After a change of `sqlite_stat1`, this connection plans as before, and a new one would not."""
    plan = "EXPLAIN QUERY PLAN SELECT * FROM item WHERE stock = 3"
    *_, before, changed, after = responses_to(
        tmp_path,
        "CREATE INDEX by_stock ON item (stock)",
        "ANALYZE",
        plan,
        "INSERT INTO sqlite_stat1 VALUES ('item', 'by_stock', '400 400')",
        plan,
    )
    assert before.rows == after.rows
    assert changed.effect == DATABASE | SESSION
    assert changed.state is None
    assert changed.witness is not None


def test_counters_and_settings_are_restored(tmp_path: Path) -> None:
    """`changes()`, `last_insert_rowid()` and pragmas have their values after a restore."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandbox = await driver.start(spec)
        await ask(sandbox, "INSERT INTO item (id, name) VALUES (700, 'a'), (701, 'b')")
        await ask(sandbox, "UPDATE item SET stock = 1 WHERE id < 10")
        await ask(sandbox, "PRAGMA case_sensitive_like = ON")
        first = [await ask(sandbox, sql) for sql in (COUNTERS, "SELECT 'a' LIKE 'A'")]
        assert [answer.rows for answer in first] == [[[9, 701, 11]], [[0]]]
        restored = await driver.restore(spec, await sandbox.freeze())
        again = [await ask(restored, sql) for sql in (COUNTERS, "SELECT 'a' LIKE 'A'", COUNTERS)]
        assert [answer.rows for answer in again] == [[[9, 701, 11]], [[0]], [[9, 701, 11]]]
        assert {answer.state for answer in (*first, *again)} == {first[0].state}
        await ask(restored, "DELETE FROM item WHERE id = 700")
        assert (await ask(restored, COUNTERS)).rows == [[1, 701, 12]]

    driven(tmp_path, test)


def test_failed_statements_keep_the_counters(tmp_path: Path) -> None:
    """A failed insert does not even change `last_insert_rowid()`."""
    *_, before, _failed, after = responses_to(
        tmp_path,
        "INSERT INTO item (id, name) VALUES (60, 'x')",
        COUNTERS,
        "INSERT INTO item (id) VALUES (80)",
        COUNTERS,
    )
    assert before.rows == after.rows == [[1, 60, 1]]
    assert before.state == after.state


def test_different_paths_meet_in_one_state(tmp_path: Path) -> None:
    """Equal content and equal counters are one state, whatever the order of statements."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        one, two = await driver.start(spec), await driver.start(spec)
        root = (await ask(one, "SELECT 1")).state
        first, second = "UPDATE item SET stock = 9 WHERE id = 1", "UPDATE item SET stock = 8 WHERE id = 2"
        assert (await ask(two, "PRAGMA user_version = 4")).state != root
        assert (await ask(two, "PRAGMA user_version = 0")).state == root
        assert forks(driver) == 0
        ways = [[await ask(one, first), await ask(one, second)], [await ask(two, second), await ask(two, first)]]
        assert ways[0][1].state == ways[1][1].state
        assert ways[0][0].state != ways[1][0].state

    driven(tmp_path, test)


def test_several_databases_are_one_state(tmp_path: Path) -> None:
    """Databases of a task are separate, and one state covers all of them."""

    async def test(driver: SqliteDriver) -> None:
        databases = {
            "shop": Database(source=str(make(tmp_path / "s.db"))),
            "other": Database(source=str(make(tmp_path / "o.db", "CREATE TABLE t AS SELECT 7 AS a"))),
        }
        spec = EnvironmentSpec(driver="sqlite", databases=databases)
        sandbox = await driver.start(spec)
        before = await ask(sandbox, "SELECT count(*) FROM item")
        wrote = await ask(sandbox, "UPDATE t SET a = 8", database="other")
        assert wrote.state not in {None, before.state}
        assert (await ask(sandbox, "SELECT * FROM t")).error is not None
        await ask(sandbox, "BEGIN")
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()
        await ask(sandbox, "COMMIT")
        restored = await driver.restore(spec, await sandbox.freeze())
        assert (await ask(restored, "SELECT a FROM t", database="other")).value == 8
        assert (await ask(restored, "SELECT count(*) FROM item")).state == wrote.state

    driven(tmp_path, test)


# -- clock and random numbers ----------------------------------------------------------------------------------------

VOLATILE = (
    "SELECT random()", "SELECT hex(randomblob(4))", "SELECT CURRENT_TIMESTAMP", "SELECT date()", "SELECT date('now')",
    "SELECT strftime('%s', 'NOW')", "SELECT julianday('n' || 'ow')", "SELECT * FROM today", "SELECT unixepoch()",
    "SELECT * FROM item ORDER BY random()", "INSERT INTO noted (what) VALUES ('x')", "DELETE FROM item WHERE id = 1",
    "INSERT INTO noted (at, what) VALUES ('', 'x')",
)  # fmt: skip
STEADY = (
    "SELECT date('2020-01-31', '+1 month')", "SELECT strftime('%Y', '2020-01-01')", "SELECT abs(-1)", "SELECT time(0)",
    "SELECT 'now'", "INSERT INTO noted VALUES ('', 1, '')", "SELECT datetime(1e9, 'unixepoch', 'localtime')",
)  # fmt: skip


def test_volatile_results_follow_the_spec(tmp_path: Path) -> None:
    """Results that depend on the clock or on random numbers are shared as `volatile` says."""

    async def test(driver: SqliteDriver) -> None:
        source = make(tmp_path / "s.db", WIDE)
        for policy in ("never", "once", "frozen"):
            spec = spec_of(source, volatile=policy)
            for statements, shared in ((VOLATILE, policy != "never"), (STEADY, True)):
                for sql in statements:
                    answer = await ask(await driver.start(spec), sql)
                    assert answer.error is None, sql
                    assert answer.shareable is shared, (policy, sql)
                    assert answer.volatile is (statements is VOLATILE and policy != "frozen"), (policy, sql)

    driven(tmp_path, test)


def test_random_session_state_is_unique(tmp_path: Path) -> None:
    """A random number in a transaction cannot be reproduced, so its witness is unique."""
    statements = ("BEGIN", "INSERT INTO item (stock, name) VALUES (random(), 'x')")
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.append([answer.witness for answer in responses_to(tmp_path / name, *statements)])
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] != runs[1][1]


def test_frozen_inputs_depend_on_the_state(tmp_path: Path) -> None:
    """With `volatile: frozen`, time is fixed and random numbers follow from the state."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db", WIDE), volatile="frozen", frozen_at="2031-02-03T04:05:06.789Z")
        runs: list[list[object]] = []
        for _ in range(2):
            sandbox = await driver.start(spec)
            runs.append([(a.rows, a.state) for a in [await ask(sandbox, sql) for sql in VOLATILE]])
        assert runs[0] == runs[1]
        sandbox = await driver.start(spec)
        assert (await ask(sandbox, "SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now')")).value == "2031-02-03T04:05:06.789"
        here = (await ask(sandbox, "SELECT random(), random(), random() FROM item")).rows
        assert len({value for row in here for value in row}) == 150
        await ask(sandbox, "DELETE FROM item WHERE id = 1")
        assert (await ask(sandbox, "SELECT random(), random(), random()")).rows[0] != here[0]

    driven(tmp_path, test)


# -- unusable sources and states -------------------------------------------------------------------------------------


def test_unusable_sources_are_spec_errors(tmp_path: Path) -> None:
    """The error says what is wrong with the source, and where."""
    (tmp_path / "text.db").write_text("this is no database, whatever its name says" * 200)
    broken = make(tmp_path / "broken.db")
    broken.write_bytes(broken.read_bytes()[:4096] + b"\xff" * 8192)
    (tmp_path / "bad.sql").write_text("CREATE TABLE a (b);\nINSERT INTO nowhere VALUES (1);")
    (tmp_path / "attach.sql").write_text("ATTACH '/tmp/x.db' AS x;")
    (tmp_path / "open.sql").write_text("BEGIN; CREATE TABLE a (b);")
    (tmp_path / "ragged.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "same.csv").write_text("a,A\n1,2\n")
    (tmp_path / "none.csv").write_text("")
    (tmp_path / "empty").mkdir()
    faults = {
        "text.db": "not a database", "broken.db": "damaged|malformed", "bad.sql": "statement 2", "attach.sql": "ATTACH",
        "open.sql": "transaction", "ragged.csv": "row 3", "same.csv": "name of its own", "none.csv": "empty",
        "empty": "without a .csv", "missing.db": "No such file",
    }  # fmt: skip

    async def test(driver: SqliteDriver) -> None:
        for name, why in faults.items():
            with pytest.raises(SpecError, match=why):
                await driver.identity(spec_of(tmp_path / name))
        assert forks(driver) == 0

    driven(tmp_path, test)


def test_touched_states_are_gone(tmp_path: Path) -> None:
    """A state whose files have other times is not restored."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandbox = await driver.start(spec)
        await ask(sandbox, "DELETE FROM item WHERE id = 1")
        frozen = await sandbox.freeze()
        for part in frozen.parts:
            os.utime(driver.store.path(part), ns=(1, 1))
        with pytest.raises(StateGoneError):
            await driver.restore(spec, frozen)
        await driver.collect([])

    driven(tmp_path, test)


@pytest.mark.parametrize("name", ["db", "db-wal", "pages"])
def test_a_changed_byte_is_not_served(tmp_path: Path, name: str) -> None:
    """A byte of a state changes on disk, and its times do not. A new process makes the state again."""
    spec = spec_of(make(tmp_path / "s.db"))

    async def freeze(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec)
        await ask(sandbox, "UPDATE item SET name = 'alpha' WHERE id = 1")
        frozen.append(await sandbox.freeze())
        before.append((await ask(await driver.start(spec), "SELECT * FROM item")).rows)

    async def restore(driver: SqliteDriver) -> None:
        sandbox = await driver.restore(spec, frozen[0])
        assert (await ask(sandbox, "SELECT name FROM item WHERE id = 1")).value == "alpha"

    async def refuse(driver: SqliteDriver) -> None:
        path = driver.store.path(frozen[0].payload["databases"]["shop"]["part"]).with_name(name)
        flip(path)
        with pytest.raises(StateGoneError):
            await driver.restore(spec, frozen[0])
        # Its database file may be the root state's: that one is made again from the source.
        assert (await ask(await driver.start(spec), "SELECT * FROM item")).rows == before[0]

    frozen: list[FrozenState] = []
    before: list[list[list[object]]] = []
    for act in (freeze, restore, refuse):
        driven(tmp_path, act)


def test_damaged_log_is_detected(tmp_path: Path) -> None:
    """The log has its length but lost its content, as after a power failure."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandbox = await driver.start(spec)
        await ask(sandbox, "DELETE FROM item")
        frozen = await sandbox.freeze()
        state = frozen.payload["databases"]["shop"]
        log = driver.store.path(state["part"]).with_name("db-wal")
        data = log.read_bytes()
        # As after a power failure: the length is right, the blocks are not.
        log.write_bytes(data[:32] + bytes(len(data) - 32))
        restored = await driver.restore(spec, frozen)
        with pytest.raises(SandboxError):
            await ask(restored, "SELECT count(*) FROM item")

    driven(tmp_path, test)


def test_second_driver_is_refused(tmp_path: Path) -> None:
    """Two drivers must not use one data directory."""

    async def test(_driver: SqliteDriver) -> None:
        with pytest.raises(SandboxError, match="in use"):
            await SqliteDriver(tmp_path / "data").open()

    driven(tmp_path, test)


def test_leftovers_of_a_kill_are_deleted(tmp_path: Path) -> None:
    """Incomplete states and forks go at the next start, and complete states stay."""
    source = make(tmp_path / "s.db")

    async def go() -> None:
        first = SqliteDriver(tmp_path / "data")
        async with opened(first):
            sandbox = await first.start(spec_of(source))
            await ask(sandbox, "DELETE FROM item WHERE id = 1")
            frozen = await sandbox.freeze()
        (tmp_path / "data" / "states" / "new-half").mkdir()
        (tmp_path / "data" / "forks" / "old").mkdir()
        (tmp_path / "data" / "forks" / "old" / "db").write_bytes(b"x")
        second = SqliteDriver(tmp_path / "data")
        async with opened(second):
            assert forks(second) == 0
            assert second.store.all() == set(frozen.parts)
            assert (await ask(await second.restore(spec_of(source), frozen), "SELECT count(*) FROM item")).value == 49

    asyncio.run(go())


def test_close_leaves_no_files_or_processes(tmp_path: Path) -> None:
    """Descriptors do not accumulate, and a closed driver leaves no worker and no fork."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        await ask(await driver.start(spec), "DELETE FROM item")
        before = open_descriptors()
        for _ in range(30):
            sandbox = await driver.start(spec)
            await ask(sandbox, "INSERT INTO item (name) VALUES ('x')")
            await ask(sandbox, HOSTILE[1])
            await sandbox.freeze()
            await sandbox.close()
        # The number of shared and spare workers varies.
        assert open_descriptors() <= before + 5
        assert forks(driver) <= 1
        pids = [worker.pid for worker in driver.worker_pool.workers]
        await driver.aclose()
        remaining.extend(pids)

    remaining: list[int] = []
    driven(tmp_path, test)
    assert remaining
    assert not [pid for pid in remaining if Path(f"/proc/{pid}").exists()]
    assert list(folder_digest(tmp_path)) == ["s.db"]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
