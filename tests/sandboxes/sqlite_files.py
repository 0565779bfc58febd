"""SQLite databases for tests, and the driver on them."""

import asyncio
import hashlib
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.sqlite.driver import SqliteDriver
from tests.sandboxes.box import opened
from tests.sandboxes.sql_calls import SqlResponse, ask

SHOP = """
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT NOT NULL, stock INT);
INSERT INTO item WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < 50)
    SELECT k, 'item ' || k, k % 7 FROM n;
CREATE VIEW few AS SELECT * FROM item WHERE id <= 3;
"""
Test = Callable[[SqliteDriver], Awaitable[None]]


def make(path: Path, script: str = SHOP) -> Path:
    """Create a database with a script."""
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path


def spec_of(source: Path | str, **more: Any) -> EnvironmentSpec:
    """Return a spec with a source as its database `shop`."""
    return EnvironmentSpec(driver="sqlite", databases={"shop": Database(source=str(source))}, **more)


def folder_digest(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder, journals and indexes included."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def driven(tmp_path: Path, test: Test) -> None:
    """Run a test with an open driver."""

    async def go() -> None:
        async with opened(driver := SqliteDriver(tmp_path / "data")):
            await test(driver)

    asyncio.run(go())


def responses_to(tmp_path: Path, *statements: str, script: str = SHOP, **spec: Any) -> list[SqlResponse]:
    """Run statements in a new sandbox and return their responses."""
    responses: list[SqlResponse] = []
    source = make(tmp_path / "source.db", script)

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(source, **spec))
        responses.extend([await ask(sandbox, statement) for statement in statements])

    driven(tmp_path, test)
    return responses


def forks(driver: SqliteDriver) -> int:
    """Return the number of forks that exist."""
    return len(list(driver.store.forks.iterdir()))
