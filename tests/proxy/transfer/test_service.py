"""Export and import: a tree arrives whole or not at all, and answers there as it did here."""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.transfer.adopt import write_draft
from proxy.transfer.format import read
from proxy.tree import tree as trees
from proxy.tree.rollout import Outcome
from sandboxes.sqlite.driver import SqliteDriver
from snapshots.policy import Reuse
from tests.proxy.dialects.test_sql_endpoint import Task, make
from tests.proxy.rig import engine
from tests.proxy.serving import Running, serving
from tests.proxy.transfer.rig import ReachingDriver, chunks, exported, walked, workload
from tests.sandboxes.memory_driver import MemoryDriver

KEEPS_NONE = Reuse(0.0, 1e9)


def test_an_imported_tree_answers_its_workload_with_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of a thousand nodes comes without states: each changing call runs once more, and then only hits."""
    # A call that runs again is a proof, however young its record is.
    monkeypatch.setattr(trees, "PROOF_AGE_S", -1.0)
    rollouts = workload(rollouts=10, calls=202)

    async def go() -> None:
        async with engine(tmp_path / "here", reuse=KEEPS_NONE) as here:
            before = await walked(here, "task", rollouts)
            opened = await here.tasks.find("task")
            assert len(opened.tree.nodes) > 1_000
            data = await exported(here, "task")
        driver = MemoryDriver()
        async with engine(tmp_path / "there", driver, reuse=KEEPS_NONE) as there:
            manifest = (await there.transfer.take("task", chunks(data))).manifest
            tree = (await there.tasks.find("task")).tree
            tree.check()
            assert (manifest.nodes, manifest.records) == (len(tree.nodes), tree.size - len(tree.nodes))
            first = await walked(there, "task", rollouts)
            executed = len(driver.executed)
            after = await walked(there, "task", rollouts, "later")
            for walk in (first, after):
                assert [answers for answers, _ in walk] == [answers for answers, _ in before]
            assert {outcome for _, outcome in after} == {Outcome.HIT}
            assert len(driver.executed) == executed
            assert list((tmp_path / "there" / "imports").iterdir()) == []

    asyncio.run(go())


def test_an_unpublished_draft_is_deleted_at_start(tmp_path: Path, bundle: bytes) -> None:
    """The process is killed between writing a draft and publishing it; the next start deletes the draft."""

    async def go() -> None:
        async with engine(tmp_path) as here:
            # As a kill would leave it: written, and never published.
            draft = here.store.drafts.begin(10, 10)
            write_draft(here.store, draft, [part for part in read(io.BytesIO(bundle)) if "blob" in part.kind])
        async with engine(tmp_path) as again:
            await again.store.drafts.sweep()
            await again.store.blobs.sweep()
            assert again.store.database.tables.table("blobs").count == 0
            assert await again.transfer.take("task", chunks(bundle))

    asyncio.run(go())


def test_tokens_for_some_tasks_bring_no_recordings(tmp_path: Path) -> None:
    """All tasks of an equal environment would get them, and the file may be forged."""
    drivers = [ReachingDriver(tmp_path / name) for name in "abc"]
    drivers[0].record(1, b"from outside")

    async def go() -> None:
        async with engine(tmp_path / "here", drivers[0]) as here:
            await walked(here, "task", [["echo 1 > f"]])
            data = await exported(here, "task")
            without = b"".join(here.transfer.export("task", (await here.tasks.find("task")).tree))
        assert [b"recording-" in file for file in (data, without)] == [True, False]
        async with engine(tmp_path / "there", drivers[1]) as there:
            await there.transfer.take("task", chunks(data), lambda spec: spec.model_copy(update={"confined": True}))
            assert not drivers[1].folder.exists()
            assert await walked(there, "task", [["pwd"]])
        async with engine(tmp_path / "whole", drivers[2]) as whole:
            await whole.transfer.take("task", chunks(data))
            assert drivers[2].files() == drivers[0].files()

    asyncio.run(go())


def test_private_records_and_set_aside_nodes_stay_home(tmp_path: Path) -> None:
    """Neither private records nor nodes that were set aside are exported."""

    async def go() -> None:
        async with engine(tmp_path / "here") as here:
            await walked(here, "task", [["echo 1 > f", "echo 2 > f", "cat f"], ["echo 3 > f"]])
            tree = (await here.tasks.find("task")).tree
            call_of = here.store.records.call
            barrier = next(r for r in tree.root.records.values() if "1" in call_of(r).arguments["command"])
            here.store.records.save_divergence(barrier, tree.set_aside(barrier, "a test"))
            data = await exported(here, "task")
        async with engine(tmp_path / "there") as there:
            assert (await there.transfer.take("task", chunks(data))).manifest.nodes == 2
            (await there.tasks.find("task")).tree.check()

    asyncio.run(go())


def test_repeated_polls_travel_with_their_keys(tmp_path: Path) -> None:
    """Repeated polls next to a background process have keys of their own, and an import accepts them."""
    commands = ["sleep 9 &", "cat seed", "cat seed", "pwd", "cat seed"]

    async def go() -> None:
        async with engine(tmp_path / "here") as here:
            answers = [answer for answer, _ in await walked(here, "task", [commands])]
            data = await exported(here, "task")
        async with engine(tmp_path / "there") as there:
            await there.transfer.take("task", chunks(data))
            imported = (await there.tasks.find("task")).tree
            # As if a replay had reached them: a state with live processes does not travel.
            for node in imported.nodes.values():
                for record in node.records.values():
                    record.proven = True
            assert await walked(there, "task", [commands]) == [(answer, Outcome.HIT) for answer in answers]

    asyncio.run(go())


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    with serving(data, drivers={"sqlite": SqliteDriver(data / "sqlite")}, import_bytes=1 << 20) as running:
        yield running


def test_trees_are_exported_and_imported_over_http(proxy: Running) -> None:
    spec = {"driver": "memory", "files": {"/root/f": "x\n"}}
    proxy.client.put("/api/v1/tasks/from", json=spec)
    first = proxy.exec("a", "cat f", task="from")
    data = proxy.client.get("/api/v1/tasks/from/export")
    assert data.headers["content-disposition"] == 'attachment; filename="from.forkpoint.tar"'
    taken = proxy.client.post("/api/v1/tasks/to/import", content=data.content)
    root = proxy.client.get("/api/v1/tasks/to").json()["root"]
    assert (taken.status_code, taken.json()) == (
        201, {
            "task": "to", "exported_from": "from", "root": root, "current": True, "nodes": 1, "records": 1,
            "snapshots": 0, "snapshots_left_out": 0,
        },
    )  # fmt: skip
    again = proxy.exec("b", "cat f", task="to")
    assert (again.content, again.headers["cache-status"]) == (first.content, "forkpoint; hit")
    # It has calls now, so nothing may take its place.
    refused = proxy.client.post("/api/v1/tasks/to/import", content=data.content)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:tree-exists")
    proxy.client.put("/api/v1/tasks/put", json=spec)
    assert proxy.client.post("/api/v1/tasks/put/import", content=data.content).status_code == 201
    assert proxy.exec("c", "cat f", task="put").headers["cache-status"] == "forkpoint; hit"
    proxy.client.put("/api/v1/tasks/other", json={"driver": "memory"})
    refused = proxy.client.post("/api/v1/tasks/other/import", content=data.content)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:root-key")
    for content, status in ((b"", 422), (b"x" * 5000, 422), (b"x" * (2 << 20), 413)):
        assert proxy.client.post("/api/v1/tasks/new/import", content=content).status_code == status
    assert proxy.client.get("/api/v1/tasks/nothing/export").status_code == 404


def test_a_database_task_needs_its_database_here(proxy: Running, tmp_path: Path) -> None:
    """The import is refused while the spec's database cannot be read, and succeeds once a spec names its new path."""
    source = make(tmp_path / "shop.db")
    task = Task(proxy, "shop", source)
    task.outcome("a", "INSERT INTO item (name) VALUES ('new')")
    data = proxy.client.get("/api/v1/tasks/shop/export").content
    # All tasks on this content share its tree, so there is no room for a second one here.
    assert proxy.client.post("/api/v1/tasks/twin/import", content=data).json()["type"] == "urn:forkpoint:tree-exists"
    proxy.client.delete("/api/v1/tasks/shop")
    # The same content at another place, as on another machine: the task that is there says where.
    source.rename(tmp_path / "moved.db")
    refused = proxy.client.post("/api/v1/tasks/twin/import", content=data)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:spec")
    spec = {"driver": "sqlite", "databases": {"shop": {"source": str(tmp_path / "moved.db")}}}
    proxy.client.put("/api/v1/tasks/twin", json=spec).raise_for_status()
    assert proxy.client.post("/api/v1/tasks/twin/import", content=data).status_code == 201
    answer = proxy.client.post("/t/twin/r/b/sql/query", json={"sql": "INSERT INTO item (name) VALUES ('new')"})
    # No state came with the file, so the call runs here before a rollout is led behind it.
    assert answer.headers["cache-status"] == "forkpoint; fwd=miss; stored; detail=not-kept"
    after = proxy.client.post("/t/twin/r/b/sql/query", json={"sql": "SELECT count(*) FROM item"})
    assert after.json()["rows"] == [[51]], "what is not recorded is run where a replay leads"
