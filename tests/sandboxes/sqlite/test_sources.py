"""Sources that a spec may name, and their root states."""

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from sandboxes.errors import SpecError
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.sqlite.driver import SqliteDriver
from tests.sandboxes.box import opened
from tests.sandboxes.sql_calls import ask
from tests.sandboxes.sqlite_files import driven, folder_digest, make, spec_of


def test_equal_content_has_one_identity(tmp_path: Path) -> None:
    """Equal files share one root state."""

    async def test(driver: SqliteDriver) -> None:
        one, two = make(tmp_path / "one.db"), tmp_path / "two.db"
        two.write_bytes(one.read_bytes())
        assert await driver.identity(spec_of(one)) == await driver.identity(spec_of(two))
        assert len(driver.store.all()) == 1
        other = make(tmp_path / "other.db", "CREATE TABLE t (a)")
        assert await driver.identity(spec_of(other)) != await driver.identity(spec_of(one))

    driven(tmp_path, test)


def test_changed_source_has_another_identity(tmp_path: Path) -> None:
    """Sandboxes that run keep the old content."""

    async def test(driver: SqliteDriver) -> None:
        source = make(tmp_path / "s.db")
        spec = spec_of(source)
        before, sandbox = await driver.identity(spec), await driver.start(spec)
        connection = sqlite3.connect(source)
        connection.execute("DELETE FROM item")
        connection.commit()
        connection.close()
        assert await driver.identity(spec) != before
        assert (await ask(sandbox, "SELECT count(*) FROM item")).value == 50
        assert (await ask(await driver.start(spec), "SELECT count(*) FROM item")).value == 0

    driven(tmp_path, test)


def test_unchanged_sources_are_not_read_again(tmp_path: Path) -> None:
    """Even another driver on the same directory starts no worker."""
    source = make(tmp_path / "s.db")

    async def go() -> None:
        for turn in range(2):
            async with opened(driver := SqliteDriver(tmp_path / "data")):
                for _ in range(3):
                    await driver.identity(spec_of(source))
                # A driver without workers has read no source. The second one loads what the first saved.
                assert (driver.worker_pool.started == 0) is (turn == 1)

    asyncio.run(go())


def test_database_in_use_is_read_consistently(tmp_path: Path) -> None:
    """Its log is read too, and nothing in its directory is touched."""
    folder = tmp_path / "source"
    folder.mkdir()
    source = make(folder / "s.db")
    writer = sqlite3.connect(source, isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL").fetchall()
    writer.execute("DELETE FROM item WHERE id > 10")
    before = folder_digest(folder)
    assert "s.db-wal" in before

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(source))
        assert (await ask(sandbox, "SELECT count(*) FROM item")).value == 10
        assert folder_digest(folder) == before
        writer.execute("DELETE FROM item WHERE id > 5")
        assert (await ask(await driver.start(spec_of(source)), "SELECT count(*) FROM item")).value == 5

    driven(tmp_path, test)
    writer.close()


def test_hot_journal_is_rolled_back_in_the_copy(tmp_path: Path) -> None:
    """A killed writer's journal is applied to the copy, and the source keeps it."""
    folder, half = tmp_path / "source", tmp_path / "half"
    folder.mkdir()
    half.mkdir()
    writer = sqlite3.connect(make(half / "s.db"), isolation_level=None)
    writer.execute("PRAGMA cache_size = 1")
    writer.execute("BEGIN")
    writer.execute("UPDATE item SET name = hex(zeroblob(2000))")
    # Copy what a killed writer would leave.
    for path in list(half.iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())
    writer.close()
    before = folder_digest(folder)
    assert "s.db-journal" in before

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(folder / "s.db"))
        assert (await ask(sandbox, "SELECT max(length(name)) FROM item")).value == len("item 10")
        assert (await ask(sandbox, "PRAGMA integrity_check")).value == "ok"

    driven(tmp_path, test)
    assert folder_digest(folder) == before


def test_scripts_are_deterministic(tmp_path: Path) -> None:
    """The clock and random numbers are frozen while a script runs."""
    script = tmp_path / "shop.sql"
    script.write_text(
        "\ufeff-- a dump\nPRAGMA foreign_keys=OFF;\nBEGIN TRANSACTION;\n"
        "CREATE TABLE t (a, at DEFAULT CURRENT_TIMESTAMP);\n"
        "INSERT INTO t (a) VALUES (';'), (random());\n"
        "CREATE TRIGGER x AFTER INSERT ON t BEGIN SELECT 1; SELECT 2; END;\nCOMMIT;\n",
        encoding="utf-8",
    )
    identities = []

    async def test(driver: SqliteDriver) -> None:
        identities.append(await driver.identity(spec_of(script)))
        sandbox = await driver.start(spec_of(script))
        response = await ask(sandbox, "SELECT count(*), min(at) FROM t")
        assert response.rows == [[2, "2026-01-01 00:00:00"]]

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        driven(tmp_path / name, test)
    assert identities[0] == identities[1]


def test_empty_script_makes_an_empty_database(tmp_path: Path) -> None:
    """The database has no tables, and can be written."""
    (tmp_path / "s.sql").write_text("")

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(tmp_path / "s.sql"))
        assert (await ask(sandbox, "SELECT count(*) FROM sqlite_schema")).value == 0
        assert (await ask(sandbox, "CREATE TABLE t (a)")).error is None

    driven(tmp_path, test)


def test_csv_files_become_tables(tmp_path: Path) -> None:
    """Types are chosen so that no value loses a digit."""
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "people.csv").write_text(
        '\ufeffid,name,height,zip,note\n1,"Ann, M.",1.70,01234,\n2,Bob,2,99999,"two\nlines"\n3,,,00001,x\n', "utf-8"
    )
    (folder / "large.csv").write_text("a,b\n9223372036854775808,12345678901234567\n1,0.5\n")
    (folder / "odd name.csv").write_text('"a ""b""",c\n9223372036854775807,1e3\n-5,0.5\n')

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(folder))
        response = await ask(sandbox, "SELECT *, typeof(id), typeof(height), typeof(zip) FROM people ORDER BY id")
        assert response.rows == [
            [1, "Ann, M.", 1.7, "01234", None, "integer", "real", "text"],
            [2, "Bob", 2.0, "99999", "two\nlines", "integer", "real", "text"],
            [3, None, None, "00001", "x", "integer", "null", "text"],
        ]
        odd = await ask(sandbox, 'SELECT "a ""b""", typeof("a ""b""") FROM "odd name"')
        assert odd.rows == [[2**63 - 1, "integer"], [-5, "integer"]]
        large = await ask(sandbox, "SELECT typeof(a), typeof(b), a FROM large")
        assert large.rows == [["text", "text", "9223372036854775808"], ["text", "text", "1"]]
        several = EnvironmentSpec(
            driver="sqlite", databases={"shop": Database(source=tuple(str(path) for path in sorted(folder.iterdir())))}
        )
        assert await driver.identity(several) == await driver.identity(spec_of(folder))

    driven(tmp_path, test)


def test_incompatible_files_are_refused(tmp_path: Path) -> None:
    """Several files must all be CSV, with distinct names."""
    for name in ("a.csv", "b.sql", "A.csv"):
        (tmp_path / name).write_text("x\n1\n")

    async def test(driver: SqliteDriver) -> None:
        for names in (("a.csv", "b.sql"), ("a.csv", "A.csv"), ()):
            source = tuple(str(tmp_path / name) for name in names)
            with pytest.raises(SpecError):
                await driver.identity(EnvironmentSpec(driver="sqlite", databases={"shop": Database(source=source)}))

    driven(tmp_path, test)


def test_sources_may_have_odd_paths(tmp_path: Path) -> None:
    """Symbolic links and characters that are special in URIs work."""
    folder = tmp_path / "odd ?#%41 näme"
    folder.mkdir()
    source = make(folder / "s?mode=memory.db")
    (tmp_path / "link.db").symlink_to(source)

    async def test(driver: SqliteDriver) -> None:
        for path in (source, tmp_path / "link.db"):
            sandbox = await driver.start(spec_of(path))
            assert (await ask(sandbox, "DELETE FROM item")).body["row_count"] == 50

    driven(tmp_path, test)
    assert len(list(folder.iterdir())) == 1


def test_data_directory_may_have_odd_name(tmp_path: Path) -> None:
    """Characters that are special in URIs work."""

    async def go() -> None:
        async with opened(driver := SqliteDriver(tmp_path / "d?a#t%20a ä")):
            sandbox = await driver.start(spec_of(make(tmp_path / "s.db")))
            assert (await ask(sandbox, "DELETE FROM item")).body["row_count"] == 50
            restored = await driver.restore(spec_of(tmp_path / "s.db"), await sandbox.freeze())
            assert (await ask(restored, "SELECT count(*) FROM item")).value == 0

    asyncio.run(go())


def test_collected_source_is_imported_again(tmp_path: Path) -> None:
    """It has the same identity as before."""

    async def test(driver: SqliteDriver) -> None:
        spec = spec_of(make(tmp_path / "s.db"))
        before = await driver.identity(spec)
        await driver.collect([])
        assert not driver.store.all()
        assert await driver.identity(spec) == before
        assert (await ask(await driver.start(spec), "SELECT count(*) FROM item")).value == 50

    driven(tmp_path, test)


def test_source_files_are_never_touched(tmp_path: Path) -> None:
    """Times, size and bytes of a source stay as they are."""
    folder = tmp_path / "source"
    folder.mkdir()
    source = make(folder / "s.db")
    source.chmod(0o444)
    before = file_facts(source)

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(source))
        for sql in ("DELETE FROM item", "VACUUM", "DROP TABLE item"):
            assert (await ask(sandbox, sql)).error is None
        await sandbox.freeze()

    driven(tmp_path, test)
    assert file_facts(source) == before


def file_facts(source: Path) -> object:
    stat = source.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_nlink
    return times, folder_digest(source.parent)


def test_a_root_state_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trusted after a loss of power, so a name must never lead to a database that is not there."""
    synced: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        if path.name.startswith("new-"):
            assert {"db", "manifest.json", path.name} <= set(synced)
            synced.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)

    async def test(driver: SqliteDriver) -> None:
        await driver.identity(spec_of(make(tmp_path / "s.db")))
        assert "renamed" in synced

    driven(tmp_path, test)
