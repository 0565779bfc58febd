"""Export and import: a tree arrives whole or not at all, and answers there as it did here."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine import Engine
from proxy.transfer.adopt import write_draft
from proxy.transfer.format import BundleError, Part, Writer, digest_of, read
from proxy.tree.rollout import Outcome
from sandboxes.sqlite.driver import SqliteDriver
from snapshots.policy import Reuse
from tests.proxy.dialects.test_sql_endpoint import Task, make
from tests.proxy.rig import ask, engine
from tests.proxy.serving import Running, serving
from tests.sandboxes.memory_driver import MemoryDriver

KEEPS_NONE = Reuse(0.0, 1e9)


def workload(rollouts: int, calls: int) -> list[list[str]]:
    """Rollouts that share their first half, then part, with looks in between."""
    shared = [part for n in range(calls // 2) for part in (f"X={n}", "cat seed")]
    return [[*shared, *(f"X={rollout}-{n}" for n in range(calls // 2)), "cat seed"] for rollout in range(rollouts)]


async def walked(running: Engine, task: str, rollouts: list[list[str]]) -> list[tuple[dict[str, Any], Outcome]]:
    opened = await running.tasks.open(task)
    answers = []
    for number, commands in enumerate(rollouts):
        rollout = running.tasks.begin(opened, f"r{number}", opened.tree, opened.tree.root)
        answers += [await ask(running, rollout, command) for command in commands]
    return answers


async def exported(running: Engine, task: str) -> bytes:
    opened = await running.tasks.find(task)
    running.journal.fold()
    return b"".join(running.transfer.export(task, opened.tree))


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 65536):
        yield data[at : at + 65536]


def test_an_imported_tree_answers_its_workload_with_hits(tmp_path: Path) -> None:
    """A tree of 10,000 nodes is exported and imported; the workload that made it then only hits."""
    rollouts = workload(rollouts=50, calls=402)

    async def go() -> None:
        async with engine(tmp_path / "here", reuse=KEEPS_NONE) as here:
            before = await walked(here, "task", rollouts)
            opened = await here.tasks.find("task")
            assert len(opened.tree.nodes) > 10_000
            data = await exported(here, "task")
        driver = MemoryDriver()
        async with engine(tmp_path / "there", driver, reuse=KEEPS_NONE) as there:
            manifest = (await there.transfer.take("task", chunks(data))).manifest
            tree = (await there.tasks.find("task")).tree
            tree.check()
            assert (manifest.nodes, manifest.records) == (len(tree.nodes), tree.size - len(tree.nodes))
            after = await walked(there, "task", rollouts)
            assert [answers for answers, _ in after] == [answers for answers, _ in before]
            assert {outcome for _, outcome in after} == {Outcome.HIT}
            assert driver.executed == []
            assert list((tmp_path / "there" / "imports").iterdir()) == []

    asyncio.run(go())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    async def go() -> bytes:
        async with engine(tmp_path_factory.mktemp("data")) as here:
            await walked(here, "task", [["echo 1 > f", "cat f", "echo 2 > f"], ["cat seed", f"echo {'x' * 3000}"]])
            return await exported(here, "task")

    return asyncio.run(go())


def verdict(data: bytes, folder: Path, task: str = "task") -> str:
    """Import data into an empty instance; return why it was refused, empty where it was not."""

    async def go() -> str:
        async with engine(folder / "there") as there:
            try:
                await there.transfer.take(task, chunks(data))
            except Exception as error:  # noqa: BLE001 - what it is, is the test's to say
                assert there.store.tasks.get(task) is None
                counts = [
                    there.store.database.tables.table(name).count for name in ("nodes", "records", "blobs", "trees")
                ]
                assert counts == [0, 0, 0, 0], "nothing half imported"
                assert list((folder / "there" / "imports").iterdir()) == []
                return str(error)
            return ""

    return asyncio.run(go())


def test_any_tar_program_can_list_a_bundle(bundle: bytes, tmp_path: Path) -> None:
    """An undamaged bundle is imported, and Python's tarfile lists its members."""
    assert verdict(bundle, tmp_path) == ""
    with tarfile.open(fileobj=io.BytesIO(bundle)) as listed:
        kinds = [name.partition("/")[0] for name in listed.getnames()]
    assert (kinds[0], kinds[-1]) == ("manifest", "seal")
    assert {"zblob", "blob", "batch"} <= set(kinds)


@given(st.data())
def test_a_flipped_bit_is_detected_and_located(bundle: bytes, data: st.DataObject) -> None:
    """Any single flipped bit makes the import fail, with an error that names the part."""
    at, bit = data.draw(st.integers(0, len(bundle) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(bundle)
    damaged[at] ^= 1 << bit
    with pytest.raises(BundleError) as refused:
        list(read(io.BytesIO(bytes(damaged))))
    assert any(word in str(refused.value) for word in ("part ", "its seal"))


@given(st.data())
def test_a_truncated_or_extended_file_is_refused(bundle: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(bundle) - 1))
    for wrong in (bundle[:cut], bundle + b"\0", bundle + bundle):
        with pytest.raises(BundleError):
            list(read(io.BytesIO(wrong)))


@given(st.binary(max_size=2000))
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        list(read(io.BytesIO(data)))


Change = Callable[[list[tuple[Part, Any]]], None]


def forged(bundle: bytes, change: Change) -> bytes:
    """Return a bundle of changed content under right digests: what a hostile hand would make."""
    parts = [(part, _lines(part)) for part in read(io.BytesIO(bundle)) if part.kind != "seal"]
    change(parts)
    writer = Writer()
    made = b""
    for part, lines in parts:
        if part.kind == "manifest":
            made += writer.json("manifest", lines)
        elif part.kind == "batch":
            made += writer.part("batch", b"\n".join(orjson.dumps(line) for line in lines))
        else:
            made += writer.part(part.kind, part.stored, part.digest)
    return made + writer.seal()


def _lines(part: Part) -> Any:
    if part.kind == "manifest":
        return orjson.loads(part.data)
    return [orjson.loads(line) for line in part.data.split(b"\n")] if part.kind == "batch" else None


def lines(parts: list[tuple[Part, Any]]) -> list[dict[str, Any]]:
    return next(opened for part, opened in parts if part.kind == "batch")


def records(parts: list[tuple[Part, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines(parts) if "key" in line]


def drop_node(parts: list[tuple[Part, Any]]) -> None:
    lines(parts).remove(next(line for line in lines(parts) if line.get("node") == 1))


def cycle(parts: list[tuple[Part, Any]]) -> None:
    first = next(record for record in records(parts) if record["target"] == 1)
    first["source"] = 1
    first["target"] = 1


def swap(parts: list[tuple[Part, Any]]) -> None:
    first = next(record for record in records(parts) if record["target"] == 1)
    first["source"], first["target"] = 2, 1


def twice(parts: list[tuple[Part, Any]]) -> None:
    lines(parts).append(records(parts)[-1])


def other_key(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["key"] = "00" * 32


def no_answer(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["answer"] = "00" * 32


def wrong_answer(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["answer"] = records(parts)[0]["call"]


def no_effect(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["effect"] = 0


def huge(parts: list[tuple[Part, Any]]) -> None:
    records(parts)[0]["source"] = 1 << 62


def lost_line(parts: list[tuple[Part, Any]]) -> None:
    lines(parts).pop()


def other_root(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["root_key"] = "ab" * 16


def other_spec(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["spec"]["files"]["/root/seed"] = "another\n"


def other_driver(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["spec"]["driver"] = "container"


def other_format(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["format"] = 2


def other_keys(parts: list[tuple[Part, Any]]) -> None:
    parts[0][1]["key_version"] = 1


def no_manifest(parts: list[tuple[Part, Any]]) -> None:
    del parts[0][1]["spec"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_node, "does not exist"), (cycle, "cycle"), (swap, "cycle"), (twice, "holds this call twice"),
        (other_key, "its key is not"), (no_answer, "is not in the file"), (wrong_answer, "cannot be read"),
        (no_effect, "effect contradicts"), (huge, "cannot be read"), (lost_line, "its manifest states"),
        (other_root, "root state"), (other_spec, "root state"), (other_driver, "cannot be used here"),
        (other_format, "format is 2"), (other_keys, "keys of version 1"), (no_manifest, "is no manifest"),
    ],
)  # fmt: skip
def test_a_forged_bundle_is_refused_with_the_reason(bundle: bytes, tmp_path: Path, change: Change, reason: str) -> None:
    """Each change keeps all digests and the seal valid, so only the check of the content can detect it."""
    assert reason in verdict(forged(bundle, change), tmp_path)


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed part that unpacks to more than the limit is refused."""
    import zlib  # noqa: PLC0415

    monkeypatch.setattr("proxy.transfer.format.MAX_PART_BYTES", 1 << 16)
    writer = Writer()
    data = bytes(1 << 20)
    made = writer.json("manifest", {}) + writer.part("zblob", zlib.compress(data), digest_of(data)) + writer.seal()
    with pytest.raises(BundleError, match="larger than"):
        list(read(io.BytesIO(made)))


def test_an_unpublished_draft_is_deleted_at_start(tmp_path: Path, bundle: bytes) -> None:
    """The process is killed between writing a draft and publishing it; the next start deletes the draft."""

    async def go() -> None:
        async with engine(tmp_path) as here:
            # As a kill would leave it: written, and never published.
            draft = here.store.drafts.begin(10, 10)
            write_draft(here.store, draft, [part for part in read(io.BytesIO(bundle)) if "blob" in part.kind])
        async with engine(tmp_path) as again:
            assert again.store.database.tables.table("blobs").count == 0
            assert await again.transfer.take("task", chunks(bundle))

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
    assert answer.headers["cache-status"] == "forkpoint; hit"
    after = proxy.client.post("/t/twin/r/b/sql/query", json={"sql": "SELECT count(*) FROM item"})
    assert after.json()["rows"] == [[51]], "what is not recorded is run where a replay leads"
