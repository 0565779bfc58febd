"""Frozen SQLite states travel as pages over their root, and come back as what they were, or are refused."""

import asyncio
import hashlib
import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.driver import FrozenState, Sandbox
from sandboxes.portability import NotPortableError
from sandboxes.sqlite.driver import SqliteDriver
from tests.sandboxes.box import opened
from tests.sandboxes.sql_calls import ask
from tests.sandboxes.sqlite_files import make, spec_of

STATEMENTS = (
    "INSERT INTO item (name, stock) VALUES ('new', 3)", "DELETE FROM item WHERE id > 40", "DELETE FROM item",
    "UPDATE item SET stock = stock + 1", "CREATE TABLE other (x BLOB)", "INSERT INTO other VALUES (zeroblob(70000))",
    "DROP TABLE item", "CREATE INDEX by_name ON item (name)", "VACUUM", "PRAGMA user_version = 7",
    "PRAGMA foreign_keys = ON", "INSERT INTO item SELECT NULL, name, stock FROM item",
)  # fmt: skip
LOOKS = (
    "SELECT * FROM sqlite_schema", "SELECT * FROM item", "SELECT length(x) FROM other", "PRAGMA user_version",
    "PRAGMA foreign_keys", "PRAGMA integrity_check", "SELECT changes(), last_insert_rowid(), total_changes()",
)  # fmt: skip


async def looks(sandbox: Sandbox) -> list[Any]:
    return [(await ask(sandbox, statement)).body for statement in LOOKS]


def packed(driver: SqliteDriver, frozen: FrozenState) -> dict[str, bytes]:
    return {part: b"".join(driver.porter.pack(part)) for part in frozen.parts}


def taken(driver: SqliteDriver, frozen: FrozenState, units: dict[str, bytes]) -> FrozenState:
    with driver.porter.unpacking() as unpacking:
        for name, data in units.items():
            unpacking.part(name, io.BytesIO(data), hashlib.sha256(data).hexdigest())
        return unpacking.state(frozen)


@settings(max_examples=15)
@given(statements=st.lists(st.sampled_from(STATEMENTS), max_size=8), twice=st.booleans())
def test_a_state_is_the_same_elsewhere(statements: list[str], twice: bool) -> None:
    """Whatever was done to the database: its content, counters and settings arrive, and rollouts go on from there."""

    async def go(folder: Path) -> None:
        source = make(folder / "shop.db")
        async with opened(here := SqliteDriver(folder / "here")), opened(there := SqliteDriver(folder / "there")):
            sandbox = await here.start(spec_of(source))
            for number, statement in enumerate(statements):
                await ask(sandbox, statement)
                if twice and number == len(statements) // 2:
                    # A state over another state, as on a rollout's way.
                    await sandbox.freeze()
            frozen = await sandbox.freeze()
            # The other machine knows the source, as its spec names it.
            await there.identity(spec_of(source))
            units = packed(here, frozen)
            came = taken(there, frozen, units)
            assert came.state == frozen.state
            restored = await there.restore(spec_of(source), came)
            assert await looks(restored) == await looks(sandbox)
            assert (await restored.freeze()).state == (await sandbox.freeze()).state
            for each in (sandbox, restored):
                await ask(each, "CREATE TABLE last (x)")
            assert (await restored.freeze()).state == (await sandbox.freeze()).state
            # What arrived is packed as it came.
            again = packed(there, came)
            assert [again[part] for part in came.parts if part.startswith("s-")] == [
                units[frozen.payload["databases"]["shop"]["part"]]
            ] * any(part.startswith("s-") for part in came.parts)
            assert await there.collect(set()) == 0

    with tempfile.TemporaryDirectory(prefix="world-sqlite-") as folder:
        asyncio.run(go(Path(folder)))


def changed(member: str, value: Any) -> Callable[[FrozenState, bytes], tuple[FrozenState, bytes]]:
    def change(frozen: FrozenState, data: bytes) -> tuple[FrozenState, bytes]:
        shop = {**frozen.payload["databases"]["shop"], member: value}
        return replace(frozen, payload={"databases": {"shop": shop}}), data

    return change


def bytes_changed(change: Callable[[bytes], bytes]) -> Callable[[FrozenState, bytes], tuple[FrozenState, bytes]]:
    return lambda frozen, data: (frozen, change(data))


HOSTILE: dict[str, Callable[[FrozenState, bytes], tuple[FrozenState, bytes]]] = {
    "no magic": bytes_changed(lambda data: b"XXXX" + data[4:]),
    "truncated": bytes_changed(lambda data: data[:-1]),
    "too long": bytes_changed(lambda data: data + b"x"),
    "another page": bytes_changed(lambda data: data[:-8] + b"changed!"),
    "other page size": bytes_changed(lambda data: data[:4] + (512).to_bytes(4, "big") + data[8:]),
    "page 0": bytes_changed(lambda data: data[:16] + bytes(4) + data[20:]),
    "a page far away": bytes_changed(lambda data: data[:16] + b"\xff\xff\xff\xff" + data[20:]),
    "a million entries": bytes_changed(lambda data: data[:12] + b"\x00\x10\x00\x00" + data[16:]),
    "empty": bytes_changed(lambda _data: b""),
    "a path as part": changed("part", "../../etc/passwd"),
    "a path as root": changed("root", "../../../tmp"),
    "a state as root": changed("root", "s-0"),
    "an unknown root": changed("root", "r-" + "0" * 40),
    "settings as SQL": changed("settings", {"user_version; ATTACH '/etc/passwd' AS x; --": 1}),
    "a setting as text": changed("settings", {"foreign_keys": "1; ATTACH 'x' AS y"}),
    "endless counters": changed("counters", [0, 0, 1 << 60]),
    "other counters": changed("counters", [1, 1, 1]),
    "short counters": changed("counters", [1]),
    "another digest": lambda frozen, data: (replace(frozen, state=None), data),
    "no databases": lambda frozen, data: (replace(frozen, payload={"databases": {}}), data),
    "more members": lambda frozen, data: (replace(frozen, payload={**frozen.payload, "x": 1}), data),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_false_state_is_refused(tmp_path: Path, change: str) -> None:
    """A file from elsewhere names no path, runs no SQL, and makes no state that it does not claim. Nothing stays."""

    async def go() -> None:
        source = make(tmp_path / "shop.db")
        async with opened(driver := SqliteDriver(tmp_path / "data")):
            sandbox = await driver.start(spec_of(source))
            await ask(sandbox, "DELETE FROM item WHERE id > 3")
            frozen = await sandbox.freeze()
            units, part = packed(driver, frozen), frozen.payload["databases"]["shop"]["part"]
            before = driver.store.all()
            forged, units[part] = HOSTILE[change](frozen, units[part])
            with pytest.raises(NotPortableError):
                taken(driver, forged, units)
            await sandbox.close()
            await driver.collect(before)
            assert driver.store.all() == before
            assert list(driver.store.temporary.iterdir()) == []

    asyncio.run(go())
