"""A database of a sandbox that the shell and the sql endpoint share and have the same state."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.driver import Driver, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import SpecError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import Database, EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.sql_calls import ask

COUNT = "SELECT count(*) FROM item"
CHANGED = Effect.FILES | Effect.DATABASE


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT)")
        database.executemany("INSERT INTO item (name) VALUES (?)", [(f"item {n}",) for n in range(50)])
    database.close()
    return path


def spec_of(source: Path, **fields: object) -> EnvironmentSpec:
    databases = {"app": Database(path="/root/app.db", source=str(source)), "new": Database(path="/root/new.db")}
    return EnvironmentSpec.model_validate({"databases": databases, **fields})


def driven(driver: Driver, spec: EnvironmentSpec, test: Callable[[Driver, Sandbox], Awaitable[None]]) -> None:
    async def go() -> None:
        async with opened(driver):
            await test(driver, await driver.start(spec))

    asyncio.run(go())


class TestShared:
    @pytest.fixture(params=["host", "image"])
    def driver(self, request: pytest.FixtureRequest, data_dir: Path) -> Driver:
        require_sandboxes()
        return OnImage(data_dir / "on-image") if request.param == "image" else LocalDriver(data_dir / "shared")

    @pytest.fixture
    def spec(self, source: Path) -> EnvironmentSpec:
        return spec_of(source)

    def test_shell_and_sql_endpoint_share_state(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """The shell and the SQL endpoint see the same state."""

        async def test(driver: Driver, sandbox: Sandbox) -> None:
            assert (await run(sandbox, "cp app.db old.db; head -c 13 app.db")).out == "SQLite format"
            read = await ask(sandbox, COUNT, database="app")
            assert (read.value, read.effect) == (50, Effect.NONE)
            wrote = await ask(sandbox, "INSERT INTO item (name) VALUES ('new')", database="app")
            assert (wrote.error, wrote.effect) == (None, CHANGED)
            assert (await ask(sandbox, COUNT, database="app")).value == 51
            restored = await driver.restore(spec, await sandbox.freeze())
            assert (await ask(restored, COUNT, database="app")).value == 51
            assert (await run(sandbox, "cp old.db app.db")).effect is Effect.FILES
            assert (await ask(sandbox, COUNT, database="app")).value == 50

        driven(driver, spec, test)

    def test_first_statement_creates_a_missing_database(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """The first statement creates a database that does not exist."""

        async def test(_driver: Driver, sandbox: Sandbox) -> None:
            assert (await ask(sandbox, "CREATE TABLE a (b)", database="new")).effect == CHANGED
            assert (await run(sandbox, "test -s new.db; echo $?")).out == "0\n"

        driven(driver, spec, test)


def local(tmp_path: Path, spec: EnvironmentSpec, test: Callable[[Driver, Sandbox], Awaitable[None]]) -> None:
    require_sandboxes()
    driven(LocalDriver(tmp_path / "data"), spec, test)


def test_a_script_does_all_or_nothing(data_dir: Path, source: Path) -> None:
    async def test(_driver: Driver, sandbox: Sandbox) -> None:
        both = await ask(
            sandbox, "DELETE FROM item WHERE id = 1; DELETE FROM item WHERE id = 2", "script", database="app"
        )
        assert (both.error, both.effect) == (None, CHANGED)
        half = await ask(sandbox, "DELETE FROM item; SELECT * FROM nowhere", "script", database="app")
        assert half.error is not None
        # SQLite's journal was in the directory for a moment, and has changed the directory's time.
        assert (half.effect & Effect.FILES, (await ask(sandbox, COUNT, database="app")).value) == (Effect.FILES, 48)

    local(data_dir / "script", spec_of(source), test)


@pytest.mark.parametrize("statement", ["BEGIN", "CREATE TEMP TABLE t (a)", "PRAGMA foreign_keys = ON"])
def test_writes_outside_the_state_are_refused(data_dir: Path, source: Path, statement: str) -> None:
    """What would last from call to call without being part of the state is refused."""

    async def test(_driver: Driver, sandbox: Sandbox) -> None:
        answer = await ask(sandbox, statement, database="app")
        assert answer.error is not None
        assert (answer.error["kind"], answer.effect) == ("refused", Effect.NONE)
        assert "shared with the shell" in answer.message

    local(data_dir / "refused", spec_of(source), test)


def test_hostile_statements_reach_nothing(data_dir: Path, source: Path) -> None:
    async def test(_driver: Driver, sandbox: Sandbox) -> None:
        for statement in ("ATTACH '/etc/passwd' AS p", "VACUUM INTO '/tmp/x'", "SELECT load_extension('x')"):
            answer = await ask(sandbox, statement, database="app")
            assert answer.error is not None
            assert answer.effect is Effect.NONE
        endless = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"
        answer = await ask(sandbox, endless, database="app", timeout_s=0.2)
        assert answer.error is not None
        assert (answer.error["kind"], answer.shareable) == ("timeout", False)
        assert not (await ask(sandbox, "SELECT random()", database="app")).shareable
        # What only looks like a database is the agent's affair, and an answer.
        await run(sandbox, "echo nonsense nonsense nonsense > new.db")
        answer = await ask(sandbox, "SELECT 1", database="new")
        assert "not a database" in answer.message

    local(data_dir / "hostile", spec_of(source), test)


def test_source_content_names_the_root_state(data_dir: Path, source: Path) -> None:
    """The content of the source names the root state."""
    require_sandboxes()

    async def go() -> None:
        async with opened(LocalDriver(data_dir / "named")) as driver:
            first = await driver.identity(spec_of(source))
            assert await driver.identity(spec_of(source)) == first
            with sqlite3.connect(source) as database:
                database.execute("DELETE FROM item")
            database.close()
            assert await driver.identity(spec_of(source)) != first
            source.with_name("shop.db-wal").write_bytes(b"in use")
            with pytest.raises(SpecError, match="in use"):
                await driver.start(spec_of(source))

    asyncio.run(go())
