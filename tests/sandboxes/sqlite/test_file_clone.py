"""Forks of one base never change its bytes, and never affect each other."""

import asyncio
import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.errors import SandboxError
from sandboxes.sqlite import file_clone
from sandboxes.sqlite.driver import SqliteDriver
from sandboxes.sqlite.pages import Pages
from tests.sandboxes.box import opened
from tests.sandboxes.sql_calls import ask
from tests.sandboxes.sqlite_files import driven, make, spec_of

COUNT = "SELECT count(*), coalesce(sum(stock), 0) FROM item"


def bases(driver: SqliteDriver) -> dict[str, str]:
    """Return the digest of each frozen database file."""
    parts = driver.store.all()
    return {part: hashlib.sha256(driver.store.path(part).read_bytes()).hexdigest() for part in parts}


def test_chain_of_forks_keeps_the_base(tmp_path: Path) -> None:
    """Sixty states, each forked from the one before, stay intact, and so does their root."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandbox = await driver.start(spec)
        await ask(sandbox, COUNT)
        before = bases(driver)
        chain = []
        for number in range(60):
            await ask(sandbox, f"INSERT INTO item (name, stock) VALUES ('n{number}', {number})")
            chain.append(await sandbox.freeze())
            sandbox = await driver.restore(spec, chain[-1])
        (root,) = before
        assert bases(driver)[root] == before[root]
        for number in (0, 29, 59):
            restored = await driver.restore(spec, chain[number])
            assert (await ask(restored, "SELECT count(*) FROM item")).value == 51 + number
            assert (await ask(restored, "PRAGMA integrity_check")).value == "ok"
        for sql in ("DELETE FROM item", "VACUUM", "DROP TABLE item"):
            assert (await ask(sandbox, sql)).error is None
        assert bases(driver)[root] == before[root]
        assert (await ask(await driver.start(spec), "PRAGMA integrity_check")).value == "ok"

    driven(tmp_path, test)


@pytest.mark.parametrize("seed", range(4))
def test_kills_during_writes_keep_the_base(tmp_path: Path, seed: int) -> None:
    """Workers die at random moments of large writes."""

    async def test(driver: SqliteDriver) -> None:
        dice = random.Random(seed)  # noqa: S311 - dice of a test
        spec = spec_of(make(tmp_path / "s.db"))
        sandboxes = [await driver.start(spec) for _ in range(6)]
        await asyncio.gather(*(ask(s, "INSERT INTO item (name) VALUES ('x')") for s in sandboxes))
        before = bases(driver)
        wide = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < 200000) "
        bulk = f"INSERT INTO item (name, stock) {wide} SELECT 'bulk', 1 FROM n"
        writing = [asyncio.ensure_future(ask(s, bulk, timeout_s=30)) for s in sandboxes]
        for _ in range(10):
            await asyncio.sleep(dice.random() * 0.05)
            # On a busy machine, none may have taken the place of the killed ones yet.
            if workers := [worker.pid for worker in driver.worker_pool.workers]:
                os.kill(dice.choice(workers), signal.SIGKILL)
        # A worker that is killed while it opens its fork is an error of its sandbox.
        results = await asyncio.gather(*writing, return_exceptions=True)
        intact = [s for s, result in zip(sandboxes, results, strict=True) if not isinstance(result, SandboxError)]
        dice.shuffle(intact)
        for sandbox in intact[::2]:
            await sandbox.close()
        for sandbox in intact[1::2]:
            assert (await ask(sandbox, "SELECT count(*) FROM item")).value in (51, 200_051)
            assert (await ask(sandbox, "PRAGMA integrity_check")).value == "ok"
        assert bases(driver) == before

    driven(tmp_path, test)


def test_hold_prevents_the_final_checkpoint(tmp_path: Path) -> None:
    """Without the lock, the closing connection writes its log into the shared file."""
    base = make(tmp_path / "base.db")
    connection = sqlite3.connect(base, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.close()
    program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
    program += "c.execute('PRAGMA wal_autocheckpoint=0').fetchall(); c.execute('DELETE FROM item'); c.close()"
    digest = hashlib.sha256(base.read_bytes()).digest()
    for locked in (True, False):
        fork = tmp_path / f"{locked}.db"
        file_clone.clone(base, fork)
        lock = file_clone.hold(fork) if locked else os.open(fork, os.O_RDONLY)
        subprocess.run(["python", "-c", program, str(fork)], check=True)
        os.close(lock)
        assert (hashlib.sha256(base.read_bytes()).digest() == digest) is locked


def test_a_file_without_links_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and states do not depend on how forks are made: some file systems have no hard links, or too few."""
    linked = rows_and_states(tmp_path / "one")
    assert file_clone.can_link(tmp_path)

    def refuse(*_paths: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert not file_clone.can_link(tmp_path)
    assert rows_and_states(tmp_path / "two") == linked


def rows_and_states(folder: Path) -> list[object]:
    """Return rows and states of some calls around a freeze and a restore."""
    folder.mkdir()
    results: list[object] = []

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(folder / "s.db"))
        sandbox = await driver.start(spec)
        for sql in (COUNT, "DELETE FROM item WHERE id > 25", "CREATE TABLE t AS SELECT * FROM item", COUNT):
            answer = await ask(sandbox, sql)
            results.append((answer.rows, answer.state))
        restored = await driver.restore(spec, await sandbox.freeze())
        for sql in (COUNT, "INSERT INTO t SELECT * FROM t", "SELECT count(*) FROM t"):
            answer = await ask(restored, sql)
            results.append((answer.rows, answer.state))

    driven(folder, test)
    return results


def test_long_logs_are_compacted(tmp_path: Path) -> None:
    """Freezing writes a long log into a new database file, with equal content and equal later states."""
    wide = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < 12000) "

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        sandbox = await driver.start(spec)
        await ask(sandbox, f"INSERT INTO item (name, stock) {wide} SELECT hex(zeroblob(400)), k FROM n", timeout_s=30)
        before = await ask(sandbox, COUNT)
        frozen = await sandbox.freeze()
        state = frozen.payload["databases"]["shop"]
        assert (state["frames"], state["base"]) == (0, state["part"])
        assert not list((tmp_path / "data" / "forks").iterdir())
        one, two = sandbox, await driver.restore(spec, frozen)
        assert [(await ask(s, COUNT)).rows for s in (one, two)] == [before.rows] * 2
        rows = "SELECT id, stock FROM item ORDER BY name, id DESC"
        answers = [[await ask(s, sql) for sql in ("DELETE FROM item WHERE id % 300 = 0", rows)] for s in (one, two)]
        assert answers[0][0].state == answers[1][0].state
        assert answers[0][1].rows == answers[1][1].rows
        await one.close()
        later = await two.freeze()
        await two.close()
        # Pages are still compared with the root, so the root stays.
        await driver.collect(later.parts)
        assert len(driver.store.all()) == 3
        assert (await ask(await driver.restore(spec, later), "PRAGMA integrity_check")).value == "ok"

    driven(tmp_path, test)


STATEMENTS = (
    "INSERT INTO item (name, stock) SELECT name, stock + 1 FROM item WHERE id < 200",
    "DELETE FROM item WHERE id % 3 = 1", "UPDATE item SET name = name || 'x'",
    "UPDATE item SET stock = id", "DELETE FROM item", "VACUUM", "ANALYZE",
    "CREATE TABLE IF NOT EXISTS more (a, b)", "DROP TABLE IF EXISTS more", "ALTER TABLE item ADD COLUMN c",
    "INSERT INTO more SELECT id, zeroblob(9000) FROM item WHERE id < 30", "INSERT INTO item (name) VALUES ('one')",
    "CREATE INDEX IF NOT EXISTS by_name ON item (name)", "DROP INDEX IF EXISTS by_name",
)  # fmt: skip


@settings(max_examples=15)
@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=8), st.integers(0, 7))
def test_equal_statements_reach_equal_pages(statements: list[str], cut: int) -> None:
    """They may run in one connection, or in one that read much, failed, or was restored in between."""

    async def go(folder: Path) -> None:
        async with opened(driver := SqliteDriver(folder / "data")):
            spec = spec_of(make(folder / "s.db"))
            one, two = await driver.start(spec), await driver.start(spec)
            for number, sql in enumerate(statements):
                first = await ask(one, sql)
                await ask(two, "SELECT * FROM item ORDER BY random()", max_rows=10_000)
                await ask(two, "INSERT INTO item (id, name) VALUES (1, 'twice'), (1, 'twice')")
                second = await ask(two, sql)
                assert (first.state, first.message) == (second.state, second.message)
                if number == cut:
                    two = await driver.restore(spec, await two.freeze())

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(go(Path(folder)))


def test_large_changes_reach_equal_pages(tmp_path: Path) -> None:
    """A change larger than the page cache spills pages into the log before it ends, and later frees some."""
    wide = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < 4000) "
    changes = (
        f"CREATE TABLE big AS {wide} SELECT k, hex(zeroblob(700)) AS text FROM n",
        "CREATE INDEX by_k ON big (k, text)",
        "UPDATE big SET text = 'short' WHERE k % 5 > 0",
        "DELETE FROM big WHERE k % 3 = 0",
        "INSERT INTO big SELECT k, hex(zeroblob(300)) FROM big",
        "BEGIN; UPDATE big SET text = hex(zeroblob(900)); DELETE FROM big WHERE k < 2000; DROP INDEX by_k; COMMIT",
    )

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        one, two = await driver.start(spec), await driver.start(spec)
        for sql in changes:
            tool = "script" if ";" in sql else "query"
            first = await ask(one, sql, tool, timeout_s=30)
            await ask(two, "SELECT sum(length(text)), count(DISTINCT k) FROM big ORDER BY 1", timeout_s=30)
            await ask(two, "SELECT * FROM big WHERE k % 7 = 0", max_rows=10)
            second = await ask(two, sql, tool, timeout_s=30)
            assert (first.error, second.error) == (None, None)
            assert first.state == second.state, sql

    driven(tmp_path, test)


def test_pages_differ_from_the_root_only(tmp_path: Path) -> None:
    """A page that equals the root's again is no change, and saved pages give the same digest."""
    root, fork = make(tmp_path / "root.db"), tmp_path / "fork.db"
    connection = sqlite3.connect(root, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.close()
    shutil.copyfile(root, fork)
    connection = sqlite3.connect(fork, isolation_level=None)
    connection.execute("PRAGMA wal_autocheckpoint=0").fetchall()
    pages = Pages(root)
    empty = pages.digest()
    wal = f"{fork}-wal"
    seen, digests = 0, []
    for sql in (
        "UPDATE item SET stock = 6 WHERE id = 5",
        "UPDATE item SET stock = 5 WHERE id = 5",
        "CREATE TABLE t (a)",
    ):
        connection.execute(sql)
        frames = (Path(wal).stat().st_size - 32) // (24 + pages.page_size)
        fd = os.open(wal, os.O_RDONLY)
        pages.take(fd, seen, frames, connection.execute("PRAGMA page_count").fetchone()[0])
        os.close(fd)
        seen = frames
        digests.append(pages.digest())
        again = Pages(root, pages.save())
        assert again.digest() == pages.digest()
        again.close()
    assert digests[0] != empty
    assert digests[1] == empty
    assert digests[2] not in {empty, digests[0]}
    pages.close()
    connection.close()
