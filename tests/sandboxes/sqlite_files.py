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
from tests.sandboxes.sql_calls import Said, ask

SHOP = """
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT NOT NULL, stock INT);
INSERT INTO item WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < 50)
    SELECT k, 'item ' || k, k % 7 FROM n;
CREATE VIEW few AS SELECT * FROM item WHERE id <= 3;
"""
Test = Callable[[SqliteDriver], Awaitable[None]]


def make(path: Path, script: str = SHOP) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path


def spec_of(source: Path | str, **more: Any) -> EnvironmentSpec:
    return EnvironmentSpec(driver="sqlite", databases={"shop": Database(source=str(source))}, **more)


def folder_digest(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder; journals and indexes that somebody left are files, too."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def driven(tmp_path: Path, test: Test) -> None:
    async def go() -> None:
        async with opened(driver := SqliteDriver(tmp_path / "data")):
            await test(driver)

    asyncio.run(go())


def said(tmp_path: Path, *statements: str, script: str = SHOP, **spec: Any) -> list[Said]:
    """Return what statements answer in a fresh sandbox, one after the other."""
    answers: list[Said] = []
    source = make(tmp_path / "source.db", script)

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(source, **spec))
        answers.extend([await ask(sandbox, statement) for statement in statements])

    driven(tmp_path, test)
    return answers


def forks(driver: SqliteDriver) -> int:
    return len(list(driver.store.forks.iterdir()))
