"""Stores of every older version open, with all that they held, or stay as they were."""

import asyncio
import random
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from proxy.refusals import RefusalError
from proxy.storage import migrations
from proxy.storage.errors import StoreError
from proxy.storage.schema import CHECKSUM_FUNCTION, SCHEMA_VERSION
from proxy.storage.store import Store
from tests.power_cuts import VARIANTS, Disk, record
from tests.proxy.rig import ask, engine
from tests.proxy.storage.migration_scenario import unpack
from tests.proxy.storage.older.generate import TOKEN

OLDER = ("schema-1-oldest", "schema-1-killed", "schema-2", "schema-3", "schema-4", "schema-5")
WALK = {"echo 1 >> log": "", "cat log": "1\n", "mkdir d": "", "cd d; pwd": "/root/d\n"}
"""Calls of rollout `a` of task `alpha` with their output in every fixture."""
CUTS = 8
"""Cuts of power, each with three disks: about a second."""


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()[0])


def tokens(path: Path) -> dict[str, str]:
    """Return the tokens of a file of schema 1, by the rollouts' names."""
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT name, token FROM rollouts WHERE task = 'alpha'").fetchall())


@pytest.mark.parametrize("name", OLDER)
def test_older_stores_open_with_everything(tmp_path: Path, name: str) -> None:
    """Trees, calls and answers are all there, and a new rollout gets right answers."""

    async def story() -> None:
        path = unpack(name, tmp_path)
        async with engine(tmp_path) as running:
            assert [name for name, _ in running.store.tasks.all()] == ["alpha", "beta"]
            rollouts = {row["name"]: row for row in running.store.rollouts.of_task("alpha")}
            assert {name: row["finished"] for name, row in rollouts.items()} == {"a": 0, "b": 0, "ended": 1, "named": 0}
            outputs = {}
            for number in running.store.trees.ids_of("alpha"):
                tree = running.store.trees.load(number)
                tree.check()
                for one in (one for node in tree.nodes.values() for one in node.records.values()):
                    call, result = running.store.records.call(one), running.store.records.result(one)
                    assert running.store.records.resources(one) is None
                    outputs[call.arguments["command"]] = orjson.loads(result.body)["stdout"]
            assert running.store.trees.damaged == 0
            assert outputs == WALK | {"echo 2 > /root/log; cat /root/log": "2\n", "echo other > file": ""}
            new = await running.tasks.rollout("alpha", "new")
            for command, output in WALK.items():
                assert (await ask(running, new, command))[0]["stdout"] == output
        assert schema_of(path) == SCHEMA_VERSION

    asyncio.run(story())


@pytest.mark.parametrize("name", OLDER)
def test_running_rollouts_continue_or_are_refused(tmp_path: Path, name: str) -> None:
    """Schema 1 had other keys, so its rollouts are refused; later ones continue where they were."""

    async def story() -> None:
        path = unpack(name, tmp_path)
        token = tokens(path)["named"] if "schema-1" in name else TOKEN
        async with engine(tmp_path) as running:
            assert running.store.rollouts.by_token(token) == ("alpha", "named")
            if "schema-1" in name:
                with pytest.raises(RefusalError, match="upgraded from schema 1"):
                    await running.tasks.rollout("alpha", "a")
                return
            rollout = await running.tasks.rollout("alpha", "a")
            assert rollout.calls == 5
            assert (await ask(running, rollout, "cat /root/log"))[0]["stdout"] == "2\n"

    asyncio.run(story())


@pytest.mark.parametrize("name", OLDER[:3])
def test_the_copy_is_the_old_store(tmp_path: Path, name: str) -> None:
    """The copy in place of the file is what the older version had, so an upgrade can be undone."""
    path = unpack(name, tmp_path)
    older = schema_of(path)
    with closing(sqlite3.connect(path)) as connection:
        before = list(connection.iterdump())
    Store(path).close()
    with closing(sqlite3.connect(migrations.copy_path(path, older))) as connection:
        assert list(connection.iterdump()) == before


def test_quarantined_records_stay_so(tmp_path: Path) -> None:
    """Up to schema 4 only the finding of an audit says that a record may not answer."""
    path = unpack("schema-4", tmp_path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO findings SELECT id, tree, 'differs', 1, 1.0 FROM records WHERE id IN (2, 3)")
        connection.execute("UPDATE findings SET quarantined = 0 WHERE record = 3")
    with closing(Store(path)) as store:
        assert store.database.rows("SELECT id FROM records WHERE quarantined", ()) == [(2,)]
        tree = store.trees.load(1)
        differing = [record for node in tree.nodes.values() for record in node.records.values() if record.differs]
        assert ([record.id for record in differing], [record.id for record in tree.aside]) == ([3], [2])


def test_damaged_rows_refuse_an_upgrade(tmp_path: Path) -> None:
    """A row that was written anew would get a right checksum, so the file stays as it is."""
    path = unpack("schema-2", tmp_path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.create_function(CHECKSUM_FUNCTION, -1, lambda *_: b"wrong", deterministic=True)
        connection.execute("UPDATE rollouts SET node = 7 WHERE name = 'b'")
    with pytest.raises(StoreError, match="1 rows of its table rollouts are damaged, and an upgrade would hide that"):
        Store(path)
    assert schema_of(path) == 2


def test_no_room_for_the_copy_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy the upgrade could not be undone, so it does not begin."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = unpack("schema-1-oldest", tmp_path)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        Store(path)
    assert schema_of(path) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["forkpoint.sqlite", "journal"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="records system calls, which needs strace")
def test_a_cut_of_power_leaves_the_old_or_the_new() -> None:
    """Whatever a cut in the middle of an upgrade leaves on the disk opens, with every call."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        arguments = ["-m", "tests.proxy.storage.migration_scenario", str(folder / "data")]
        operations = record(arguments, folder / "data", folder / "trace")
        begin = next(index for index, operation in enumerate(operations) if operation.kind == "answered")
        dice = random.Random(8)  # noqa: S311 - the same cuts each time
        seen = set()
        for cut in [*dice.sample(range(begin + 1, len(operations)), CUTS), len(operations)]:
            for variant in VARIANTS:
                disk = folder / f"{cut}-{variant}"
                Disk(operations[:cut]).build(disk, variant, dice)
                seen.add(schema_of(disk / "forkpoint.sqlite"))
                with closing(Store(disk / "forkpoint.sqlite")) as store:
                    sizes = [store.trees.load(number).size for number in store.trees.ids_of("alpha")]
                    assert (sizes, store.trees.damaged, len(store.rollouts.of_task("alpha"))) == ([12], 0, 4)
        assert seen == {1, SCHEMA_VERSION}
