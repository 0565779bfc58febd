"""Promise 1 with databases: each rollout gets the answers of a private SQLite, whatever happens around it."""

import asyncio
import os
import signal
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine import build_engine
from proxy.settings import Settings
from proxy.tree.rollout import Outcome
from sandboxes.sql.sqlite_connection import statements
from sandboxes.sqlite.driver import SqliteDriver
from snapshots.policy import Reuse
from tests.proxy.rig import KEEPS_ALL
from tests.proxy.sql_walks import Statement, Trouble, ask, walk
from tests.sandboxes.sqlite_files import folder_digest, make, spec_of

WALKS = int(os.environ.get("SQL_WALKS", "25"))
SCRIPT = """
PRAGMA foreign_keys = OFF;
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT UNIQUE, stock INT DEFAULT 0, CHECK (stock >= 0));
CREATE TABLE sale (id INTEGER PRIMARY KEY AUTOINCREMENT, item INT REFERENCES item, amount REAL);
CREATE TABLE log (text);
CREATE TRIGGER sold AFTER INSERT ON sale BEGIN INSERT INTO log VALUES ('sold ' || new.item); END;
CREATE VIEW dear AS SELECT item, sum(amount) AS amount FROM sale GROUP BY item;
INSERT INTO item VALUES (1, 'one', 5), (2, 'two', 0), (3, 'three', 7);
INSERT INTO sale (item, amount) VALUES (1, 2.5), (3, 1e10);
"""
SQL = (
    "SELECT * FROM item", "SELECT * FROM sale", "SELECT * FROM log", "SELECT * FROM dear", "SELECT * FROM extra",
    "SELECT name, type FROM sqlite_schema", "SELECT count(*) FROM mine",
    "PRAGMA foreign_keys", "PRAGMA user_version", "PRAGMA table_info(item)", "PRAGMA page_count",
    "PRAGMA integrity_check", "SELECT 'a' LIKE 'A', 1/0, x'00ff', 9223372036854775807, 1e999",
    "INSERT INTO item (name) VALUES ('new')", "INSERT INTO item VALUES (2, 'twice', 0)",
    "INSERT INTO sale (item, amount) VALUES (2, 7)", "INSERT INTO sale (item, amount) VALUES (99, 1)",
    "UPDATE item SET stock = stock + 1", "UPDATE item SET stock = stock - 1", "UPDATE item SET name = name",
    "DELETE FROM item WHERE id = 1", "DELETE FROM item WHERE id = 77", "DELETE FROM sale", "DELETE FROM log",
    "INSERT INTO item SELECT NULL, 'copy ' || id || ' of ' || name, stock FROM item",
    "UPDATE item SET stock = 1 WHERE id = 2 RETURNING id, stock", "REPLACE INTO item VALUES (3, 'drei', 3)",
    "CREATE TABLE extra (a, b)", "CREATE TABLE IF NOT EXISTS extra (a, b)", "DROP TABLE extra", "VACUUM",
    "INSERT INTO extra SELECT id, name FROM item", "CREATE INDEX by_stock ON item (stock)", "DROP INDEX by_stock",
    "ALTER TABLE item ADD COLUMN more TEXT DEFAULT 'm'", "ALTER TABLE item DROP COLUMN more", "ANALYZE", "REINDEX",
    "BEGIN", "BEGIN IMMEDIATE", "COMMIT", "ROLLBACK", "SAVEPOINT s", "ROLLBACK TO s", "RELEASE s",
    "CREATE TEMP TABLE mine (a)", "INSERT INTO mine VALUES (1)", "DROP TABLE mine", "PRAGMA foreign_keys = ON",
    "PRAGMA foreign_keys = OFF", "PRAGMA case_sensitive_like = ON", "PRAGMA reverse_unordered_selects = ON",
    "PRAGMA defer_foreign_keys = ON", "PRAGMA defer_foreign_keys",
    "PRAGMA user_version = 5", "ATTACH ':memory:' AS aside", "CREATE TABLE aside.t AS SELECT 1 AS x", "DETACH aside",
    "SELECT * FROM aside.t", "EXPLAIN QUERY PLAN SELECT * FROM item WHERE stock = 1", "SELEC nonsense", "SELECT * FROM",
    "WITH gone AS (SELECT 1) DELETE FROM sale WHERE id IN (SELECT * FROM gone)",
    "SELECT name -- and a remark\nFROM item", "select  name   from item",
)  # fmt: skip
MORE_SQL = (
    "CREATE TABLE gen (a INT, b INT GENERATED ALWAYS AS (a * 2) STORED, c AS (a + 1))",
    "INSERT INTO gen (a) VALUES (4), (5)", "SELECT * FROM gen", "UPDATE gen SET a = a + 1 RETURNING *",
    "CREATE TABLE wr (k TEXT PRIMARY KEY, v) WITHOUT ROWID", "INSERT INTO wr VALUES ('b', 1), ('a', 2)",
    "SELECT * FROM wr", "INSERT INTO wr VALUES ('a', 9) ON CONFLICT (k) DO UPDATE SET v = v + excluded.v",
    "CREATE VIRTUAL TABLE ft USING fts5(body)",
    "INSERT INTO ft VALUES ('the quick fox'), ('lazy dog'), ('quick dog')",
    "SELECT rowid, body, rank FROM ft WHERE ft MATCH 'quick' ORDER BY rank",
    "INSERT INTO ft(ft, rank) VALUES ('rank', 'bm25(5.0)')", "INSERT INTO ft(ft) VALUES ('rebuild')",
    "DELETE FROM ft WHERE rowid = 2", "SELECT highlight(ft, 0, '<', '>') FROM ft('dog')",
    "INSERT INTO ft(ft, rank) VALUES ('pgsz', 64)", "INSERT INTO ft(ft) VALUES ('integrity-check')",
    "CREATE VIRTUAL TABLE rt USING rtree(id, x0, x1)", "INSERT INTO rt VALUES (1, 0, 5), (2, 3, 9)",
    "SELECT id FROM rt WHERE x1 > 4 AND x0 < 4", "SELECT rtreecheck('rt')", "SELECT * FROM sqlite_sequence",
    "UPDATE sqlite_sequence SET seq = 100", "DELETE FROM sqlite_sequence", "ANALYZE item",
    "SELECT * FROM sqlite_stat1", "DELETE FROM sqlite_stat1", "UPDATE sqlite_stat1 SET stat = '100000 1'",
    "INSERT INTO sqlite_stat1 VALUES ('item', 'by_stock', '100000 2')", "DROP TABLE sqlite_stat1",
    "ANALYZE sqlite_schema", "SELECT name FROM item WHERE stock > 0 AND name > 'a'",
    "SELECT i.name, s.id FROM item i, sale s WHERE s.item = i.id AND i.stock >= 0",
    "EXPLAIN QUERY PLAN SELECT i.name FROM item i, sale s WHERE s.item = i.id AND i.stock > 1 AND s.amount > 2",
    "EXPLAIN QUERY PLAN SELECT name FROM item WHERE stock > 0 AND name > 'a'", "CREATE INDEX by_item ON sale (item)",
    "CREATE INDEX part ON item (name) WHERE stock > 0", "CREATE INDEX expr ON item (length(name))",
    "SELECT name FROM item WHERE stock IN (0, 5, 7, 8)", "SELECT DISTINCT stock FROM item", "PRAGMA schema_version",
    "PRAGMA freelist_count", "PRAGMA application_id = 7", "PRAGMA application_id", "PRAGMA auto_vacuum",
    "PRAGMA incremental_vacuum(1)", "PRAGMA encoding", "PRAGMA page_size", "PRAGMA recursive_triggers = ON",
    "PRAGMA recursive_triggers", "PRAGMA ignore_check_constraints = ON", "PRAGMA query_only = ON",
    "PRAGMA query_only = OFF", "PRAGMA query_only", "PRAGMA legacy_alter_table = ON", "PRAGMA trusted_schema = OFF",
    "PRAGMA automatic_index = OFF", "PRAGMA cache_size = 5", "PRAGMA cache_size", "PRAGMA case_sensitive_like = OFF",
    "SELECT name FROM item WHERE name LIKE 'T%'", "PRAGMA reverse_unordered_selects = OFF",
    "PRAGMA cell_size_check = ON", "PRAGMA synchronous = FULL",
    "CREATE TRIGGER tr INSTEAD OF INSERT ON dear BEGIN INSERT INTO log VALUES ('view ' || new.item); END",
    "INSERT INTO dear VALUES (1, 2)",
    "CREATE TEMP TRIGGER ttr AFTER UPDATE ON item BEGIN INSERT INTO log VALUES ('u' || old.id); END",
    "DROP TRIGGER ttr", "DROP TRIGGER sold", "CREATE TEMP VIEW tv AS SELECT name FROM item", "SELECT * FROM tv",
    "DROP VIEW tv", "CREATE TEMP TABLE item (shadow)", "DROP TABLE temp.item", "ALTER TABLE item RENAME TO goods",
    "ALTER TABLE goods RENAME TO item", "ALTER TABLE item RENAME COLUMN stock TO amount",
    "ALTER TABLE item RENAME COLUMN amount TO stock", "ALTER TABLE sale ADD COLUMN tax AS (amount * 0.2)",
    "DELETE FROM item WHERE id > 1000000", "INSERT OR IGNORE INTO item VALUES (1, 'one', 5)",
    "INSERT OR REPLACE INTO item VALUES (1, 'one', -5)", "INSERT OR ROLLBACK INTO item VALUES (1, 'one', 5)",
    "INSERT OR FAIL INTO item (name) VALUES ('q'), ('one'), ('r')", "UPDATE OR IGNORE item SET id = 3",
    "INSERT INTO item DEFAULT VALUES",
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 40) INSERT INTO log SELECT n FROM c",
    "DELETE FROM log WHERE rowid % 2", "SELECT count(*), max(rowid) FROM log", "SELECT rowid, text FROM log LIMIT 5",
    "SELECT name, rowid FROM item ORDER BY stock", "SELECT * FROM pragma_table_list", "PRAGMA foreign_key_check",
    "PRAGMA table_list", "PRAGMA index_list(item)", "SELECT json_group_array(name) FROM item",
    "SELECT sum(amount) OVER (ORDER BY id), id FROM sale", "SAVEPOINT a", "RELEASE a", "ROLLBACK TO a", "END",
    "BEGIN EXCLUSIVE", "SELECT sql FROM sqlite_schema WHERE name = 'item'", "CREATE TABLE strict1 (a INT) STRICT",
    "INSERT INTO strict1 VALUES ('x')", "REINDEX item",
)  # fmt: skip
"""Rarer kinds, for `bench.differential` and thorough runs: tables of other kinds, statistics, settings."""
SCRIPTS = (
    "INSERT INTO item (name) VALUES ('s'); UPDATE item SET stock = 9; SELECT * FROM item;",
    "BEGIN; DELETE FROM sale; INSERT INTO log VALUES ('all gone'); COMMIT;",
    "CREATE TRIGGER t AFTER DELETE ON item BEGIN INSERT INTO log VALUES ('x;'); END; DELETE FROM item WHERE id = 3;",
    "DELETE FROM item; INSERT INTO nowhere VALUES (1);",
)
words = st.one_of(
    st.tuples(st.just("query"), st.sampled_from(SQL)),
    st.tuples(st.just("query"), st.sampled_from(SQL + MORE_SQL if WALKS > 25 else SQL)),
    st.tuples(st.just("script"), st.sampled_from(SCRIPTS)),
)
walks = st.lists(st.lists(words, max_size=12), min_size=1, max_size=8)


class Private:
    """A database of one's own, in the standard library's way."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(make(path, SCRIPT), isolation_level=None, cached_statements=0)
        # One that has not read its schema yet may find no table after SAVEPOINT, ROLLBACK TO and ATTACH (3.40).
        self._connection.execute("SELECT count(*) FROM sqlite_schema")

    def answer(self, statement: Statement) -> dict[str, Any] | str:
        """Return columns and rows, or the message of an error."""
        tool, sql = statement
        if tool == "query":
            return self._run(sql)
        return self._script(sql)

    def _run(self, sql: str) -> dict[str, Any] | str:
        try:
            cursor = self._connection.execute(sql)
            rows = [list(map(_told, row)) for row in cursor]
        except sqlite3.Error as error:
            return str(error)
        return {"columns": [column[0] for column in cursor.description or ()], "rows": rows}

    def _script(self, script: str) -> dict[str, Any] | str:
        # One that begins a transaction of its own cannot fail after its first statement.
        own = script.startswith("BEGIN") and not self._connection.in_transaction
        if not own:
            self._connection.execute("SAVEPOINT whole")
        last: dict[str, Any] = {"columns": [], "rows": []}
        for number, sql in enumerate(statements(script), 1):
            answer = self._run(sql)
            if isinstance(answer, str):
                if not own:
                    self._connection.execute("ROLLBACK TO whole")
                    self._connection.execute("RELEASE whole")
                return f"statement {number}: {answer}"
            last = answer if answer["columns"] else last
        if not own:
            self._connection.execute("RELEASE whole")
        return last


def _told(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": "AP8="}
    return {"float": "inf"} if value == float("inf") else value


def alone(walked: list[Statement], folder: Path) -> list[dict[str, Any] | str]:
    private = Private(folder / "private.db")
    return [private.answer(statement) for statement in walked]


def shown(answer: dict[str, Any]) -> dict[str, Any] | str:
    if answer["error"] is not None:
        return str(answer["error"]["message"])
    return {"columns": answer["columns"], "rows": answer["rows"]}


async def together(
    rollouts: list[list[Statement]], folder: Path, seed: int, trouble: float, reuse: Reuse, **options: Any
) -> list[list[dict[str, Any] | str]]:
    driver = SqliteDriver(folder / "sqlite")
    spec = spec_of(make(folder / "source" / "shop.db", SCRIPT))
    engine = build_engine(
        Settings(data=folder / "data", default_spec=spec, warm_sandboxes=0, **options), {"sqlite": driver}
    )
    engine.snapshot_value.reuse = reuse

    def workers() -> list[int]:
        return [worker.pid for worker in driver.worker_pool.workers]

    try:
        await engine.open()
        luck = Trouble(seed, trouble, workers, lambda pid: os.kill(pid, signal.SIGKILL))
        answers = await asyncio.gather(*(walk(engine, f"r{n}", each, luck) for n, each in enumerate(rollouts)))
        await engine.capture.drain()
        engine.pool.roster.check()
        task = await engine.tasks.open("task")
        task.tree.check()
        assert engine.counts.divergences == 0
    finally:
        await engine.aclose()
    assert not list((folder / "sqlite" / "forks").iterdir())
    return [[shown(answer) for answer in each] for each in answers]


@settings(max_examples=WALKS)
@given(
    walks, st.integers(), st.sampled_from([0, 0.15]), st.sampled_from([KEEPS_ALL, Reuse()]),
    st.sampled_from([1, 3, 64]),
)  # fmt: skip
def test_each_rollout_is_answered_as_if_alone(
    rollouts: list[list[Statement]], seed: int, trouble: float, reuse: Reuse, most: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        got = asyncio.run(together(rollouts, folder, seed, trouble, reuse, max_sandboxes=most))
        assert list(folder_digest(folder / "source")) == ["shop.db"]
        for number, walked in enumerate(rollouts):
            (own := folder / f"own-{number}").mkdir()
            assert got[number] == alone(walked, own), walked


def test_random_states_are_kept_for_later_rollouts(tmp_path: Path) -> None:
    """A rollout comes by hits to a state with a random number that its maker has left, and goes on from there."""

    async def body() -> None:
        spec = spec_of(make(tmp_path / "shop.db", SCRIPT), volatile="once")
        driver = SqliteDriver(tmp_path / "sqlite")
        engine = build_engine(Settings(data=tmp_path / "data", default_spec=spec, warm_sandboxes=0), {"sqlite": driver})
        # No state is worth a snapshot for the time that it saves.
        engine.snapshot_value.reuse = Reuse(0.0, 1e9)
        await engine.open()
        try:
            draw = [("query", "UPDATE item SET stock = abs(random())"), ("query", "UPDATE item SET name = 'x' || id")]
            look = ("query", "SELECT sum(stock) FROM item")
            first = [await ask(engine, "first", statement) for statement in (*draw, ("query", "DELETE FROM log"), look)]
            await engine.capture.drain()
            await engine.pool.close_where(lambda _: True)
            later = [await ask(engine, "later", statement) for statement in (*draw, look)]
            # The state that is not worth a snapshot is made again, from the random one, which was kept.
            assert [answer["outcome"] for answer in later[:2]] == [Outcome.HIT, Outcome.MISS]
            assert later[-1]["rows"] == first[-1]["rows"]
            assert engine.counts.divergences == 0
        finally:
            await engine.aclose()

    asyncio.run(body())
