"""Kept states travel with their tree: what is restored elsewhere is what was frozen here, or is refused by name."""

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.engine import Engine, build_engine
from proxy.refusals import RefusalError
from proxy.settings import Settings
from proxy.transfer.format import Writer, read
from proxy.tree.rollout import Outcome
from sandboxes.driver import FrozenState
from sandboxes.egress.gateway import EgressGateway
from sandboxes.local.driver import LocalDriver
from sandboxes.server_spec import Egress as Hosts
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from sandboxes.sqlite.driver import SqliteDriver
from tests.machine import require_sandboxes
from tests.proxy import sql_walks
from tests.proxy.rig import KEEPS_ALL, ask, engine, opened
from tests.proxy.serving import serving
from tests.proxy.transfer.rig import chunks, walked
from tests.sandboxes import sqlite_files
from tests.sandboxes.box import local_driver, needs_root, written_uppers
from tests.sandboxes.egress.origin import Origin, response
from tests.sandboxes.egress.test_gateway import FETCH
from tests.sandboxes.local.test_states import small_base

CALLS = ["cd /root; X=1", "mkdir d; echo one > d/f", "echo two > d/g; rm d/f", "cat d/g"]


async def exported(running: Engine, task: str) -> bytes:
    opened = await running.tasks.find(task)
    await running.capture.drain()
    running.journal.fold()
    with running.transfer.lend_states(opened.tree) as states:
        return b"".join(running.transfer.export(task, opened.tree, states))


def local(data: Path, base: Path, **settings: Any) -> Engine:
    spec = EnvironmentSpec(base=str(base), files={"/root/seed": "seed\n"})
    set_up = Settings(data=data, default_spec=spec, warm_sandboxes=0, **settings)
    running = build_engine(set_up, {"local": local_driver(data / "local")})
    running.snapshot_value.reuse = KEEPS_ALL
    return running


def on_local(data: Path, base: Path, act: Callable[[Engine], Any], **settings: Any) -> Any:
    """Run act on an engine with real sandboxes."""

    async def go() -> Any:
        running = local(data, base, **settings)
        await running.open()
        try:
            return await act(running)
        finally:
            await running.aclose()

    return asyncio.run(go())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_sandboxes()
    root = small_base(tmp_path_factory.mktemp("base"))
    for name in ("rm", "mkdir"):
        (root / "bin" / name).write_bytes(Path("/bin", name).read_bytes())
        (root / "bin" / name).chmod(0o755)
    return root


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, base: Path) -> bytes:
    async def act(here: Engine) -> bytes:
        await walked(here, "task", [CALLS])
        return await exported(here, "task")

    data: bytes = on_local(tmp_path_factory.mktemp("here"), base, act)
    return data


@needs_root
def test_leaving_an_imported_tree_replays_nothing(tmp_path: Path, base: Path, bundle: bytes) -> None:
    """A rollout that misses below an imported snapshot restores it; no call is replayed."""

    async def act(there: Engine) -> None:
        taken = await there.transfer.take("task", chunks(bundle))
        assert taken.snapshots == len(there.snapshots) == taken.manifest.snapshots > 0
        assert taken.left_out == 0
        answers = await walked(there, "task", [[*CALLS, "echo three >> d/g", "echo $X; cat d/g; ls d"]])
        assert [outcome for _, outcome in answers] == [Outcome.HIT] * len(CALLS) + [Outcome.MISS] * 2
        assert answers[-1][0]["stdout"] == "1\ntwo\nthree\ng\n"
        assert there.counts.replayed_calls == 0
        await there.capture.drain()
        # Nothing else holds what came.
        there.cache.drop_tree((await there.tasks.find("task")).tree.id)
        await there.pool.close_where(lambda _: True)
        await there.collect_garbage()
        remaining = {path.name for path in (tmp_path / "local" / "layers").iterdir()}
        assert remaining <= {layer for root in _driver(there).roots.used() for layer in root.layers}

    on_local(tmp_path, base, act)


def _driver(running: Engine) -> LocalDriver:
    driver = running.drivers["local"]
    assert isinstance(driver, LocalDriver)
    return driver


@needs_root
def test_an_imported_snapshot_restores_the_recorded_digest(tmp_path: Path, base: Path, bundle: bytes) -> None:
    async def act(there: Engine) -> None:
        await there.transfer.take("task", chunks(bundle))
        tree = (await there.tasks.find("task")).tree
        for snapshot in there.snapshots:
            frozen = there.snapshots.load(snapshot)
            sandbox = await _driver(there).restore(tree.spec, frozen)
            again = await sandbox.freeze()
            await sandbox.close()
            assert again.state == frozen.state == tree.nodes[snapshot.node].state

    on_local(tmp_path, base, act)


@needs_root
def test_snapshots_over_budget_are_left_out_and_counted(tmp_path: Path, base: Path, bundle: bytes) -> None:
    async def act(there: Engine) -> None:
        taken = await there.transfer.take("task", chunks(bundle))
        assert (taken.snapshots, taken.left_out) == (0, taken.manifest.snapshots)
        assert len(there.snapshots) == 0
        answers = await walked(there, "task", [[*CALLS, "cat d/g; cat seed"]])
        assert answers[-1][0]["stdout"] == "two\nseed\n"

    on_local(tmp_path, base, act, snapshot_bytes=0)


Change = Callable[[bytes], bytes]


def forged(bundle: bytes, change: Change, *, honest: bool = True) -> bytes:
    """Return a bundle whose last unit was changed; honest: under right digests, as a hostile hand would make it."""
    parts = [part for part in read(io.BytesIO(bundle)) if part.kind != "seal"]
    last = max(number for number, part in enumerate(parts) if part.kind == "part")
    name = orjson.loads(parts[last].data)["name"]
    writer, made, unit = Writer(), b"", b""
    for number, part in enumerate(parts):
        if number > last and part.kind == "chunk":
            unit += part.data
            continue
        if unit:
            unit = change(unit)
            made += writer.part("chunk", unit)
            answers = {"name": name, "sha256": hashlib.sha256(unit).hexdigest(), "size_bytes": len(unit)}
            unit = b""
        if part.kind == "snapshot" and number > last and honest:
            line = orjson.loads(part.data)
            line["units"] = [answers if unit_ref["name"] == name else unit_ref for unit_ref in line["units"]]
            made += writer.json("snapshot", line)
        else:
            made += writer.part(part.kind, part.stored, part.digest)
    return made + writer.seal()


def flip(unit: bytes) -> bytes:
    at = unit.index(b"two\n")
    return unit[:at] + b"owt\n" + unit[at + 4 :]


def with_member(member: tarfile.TarInfo, data: bytes = b"") -> Change:
    def change(unit: bytes) -> bytes:
        member.size = len(data)
        member.pax_headers = {"FORKPOINT.mtime_ns": "0", **member.pax_headers}
        head = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        return unit[:-1024] + head + data + bytes(-len(data) % 512) + bytes(1024)

    return change


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", headers: dict[str, str] | None = None
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.pax_headers = kind, link, headers or {}
    return info


def device() -> tarfile.TarInfo:
    info = member("diff/sda", tarfile.BLKTYPE)
    info.devmajor = 8
    return info


def through_a_link(unit: bytes) -> bytes:
    return with_member(member("diff/l/x"))(with_member(member("diff/l", tarfile.SYMTYPE, "/tmp"))(unit))


def refusal(data: bytes, folder: Path, base: Path) -> str:
    """Import data into an empty instance; return why it was refused; nothing of it may be left."""

    async def act(there: Engine) -> str:
        with pytest.raises(RefusalError) as refused:
            await there.transfer.take("task", chunks(data))
        assert there.store.tasks.get("task") is None
        assert len(there.snapshots) == 0
        assert list((folder / "imports").iterdir()) == []
        await there.collect_garbage()
        remaining = {path.name for path in (folder / "local" / "layers").iterdir()}
        assert remaining <= {layer for root in _driver(there).roots.used() for layer in root.layers}
        assert not written_uppers(folder / "local")
        return str(refused.value)

    message: str = on_local(folder, base, act)
    return message


@needs_root
def test_a_flipped_byte_in_a_layer_is_located(tmp_path: Path, base: Path, bundle: bytes) -> None:
    """The import fails with an error that names the damaged part, also when its name is forged to match."""
    assert "chunk/" in refusal(flip(bundle), tmp_path / "one", base)
    # Under a right digest of the chunk, the unit's own one tells.
    assert "digest of unit" in refusal(forged(bundle, flip, honest=False), tmp_path / "two", base)


@needs_root
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_member(member("diff/../../x"), b"x"), "leads out"),
        (with_member(member("../x"), b"x"), "leads out"),
        (with_member(member("/tmp/forkpoint-x"), b"x"), "leads out"),
        (with_member(member("diff/..", tarfile.DIRTYPE)), "leads out"),
        (through_a_link, "leads out"),
        (with_member(member("diff/h", tarfile.LNKTYPE, "/etc/passwd")), "did not come before"),
        (with_member(member("diff")), "in it twice"),
        (with_member(device()), "device"),
        (
            with_member(member("diff/x", headers={"FORKPOINT.xattr.trusted.overlay.redirect": "Lw=="})),
            "cannot be imported",
        ),
        (with_member(member("diff/x", headers={"GNU.sparse.size": "99999999999"})), "cannot be imported"),
        (lambda unit: unit[:512], "not a tar of a layer"),
        (lambda unit: unit + bytes(512), "its digest is another"),
    ],
)
def test_hostile_members_of_a_layer_are_refused(
    tmp_path: Path, base: Path, bundle: bytes, change: Change, reason: str
) -> None:
    """Members that would write outside the layer, or that are not what a layer holds, are refused."""
    message = refusal(forged(bundle, change), tmp_path / "there", base)
    assert reason in message
    assert "unit '" in message
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_memory_driver_exports_and_checks_snapshots(tmp_path: Path) -> None:
    """Snapshots of a kind that the driver cannot carry are counted as left out; a forged one is refused."""

    async def go() -> None:
        async with engine(tmp_path / "here") as here:
            await walked(here, "task", [["echo 1 > f", "X=2", "sleep 9 &", "cat f"]])
            tree = (await here.tasks.find("task")).tree
            beside = next(node for node in tree.nodes.values() if node.snapshot is None and node is not tree.root)
            # As of a driver that can keep live processes.
            assert here.capture.adopt(FrozenState("memory", "processes", {}, 0, None), tree, beside, cost_s=0.0)
            data = await exported(here, "task")
        for folder, state in (("whole", data), ("forged", _swapped(data))):
            async with engine(tmp_path / folder) as there:
                if folder == "forged":
                    with pytest.raises(RefusalError, match="its digest is another"):
                        await there.transfer.take("task", chunks(state))
                    assert there.store.tasks.get("task") is None
                    continue
                taken = await there.transfer.take("task", chunks(state))
                assert taken.snapshots == taken.manifest.snapshots > 0
                assert taken.left_out == 1
                task = await there.tasks.find("task")
                rollout = there.tasks.rollouts.begin(task, "r", task.tree, task.tree.root)
                for command in ("echo 1 > f", "X=2"):
                    assert (await ask(there, rollout, command))[1] is Outcome.HIT
                answers, _ = await ask(there, rollout, "echo $X; cat f")
                assert (answers["stdout"], there.counts.replayed_calls) == ("2\n1\n", 0)

    asyncio.run(go())


def _swapped(data: bytes) -> bytes:
    writer, made = Writer(), b""
    for part in read(io.BytesIO(data)):
        if part.kind == "snapshot":
            line = orjson.loads(part.data)
            line["payload"]["files"]["/root/evil"] = "x"
            made += writer.json("snapshot", line)
        elif part.kind != "seal":
            made += writer.part(part.kind, part.stored, part.digest)
    return made + writer.seal()


def test_snapshots_are_exported_on_request_only(tmp_path: Path) -> None:
    with serving(tmp_path) as proxy:
        proxy.client.put("/api/v1/tasks/from", json={"driver": "memory"})
        proxy.exec("a", "echo 1 > f", task="from")
        assert proxy.client.post("/api/v1/tasks/from/nodes/n2/snapshot").is_success
        without = proxy.client.get("/api/v1/tasks/from/export").content
        data = proxy.client.get("/api/v1/tasks/from/export", params={"snapshots": "true"}).content
        kinds = [{part.kind for part in read(io.BytesIO(file))} & {"snapshot", "part"} for file in (without, data)]
        assert kinds == [set(), {"snapshot", "part"}]
        proxy.client.delete("/api/v1/tasks/from")
        imported = proxy.client.post("/api/v1/tasks/to/import", content=data).json()
        assert (imported["snapshots"], imported["snapshots_left_out"]) == (len(_states(data)), 0)


def _states(data: bytes) -> list[str]:
    return [part.name for part in read(io.BytesIO(data)) if part.kind == "snapshot"]


def test_states_of_databases_travel(tmp_path: Path) -> None:
    """A rollout that misses behind an imported state of a database restores it; no statement is replayed."""
    source = sqlite_files.make(tmp_path / "shop.db")
    statements = [("query", "DELETE FROM item WHERE id > 3"), ("query", "UPDATE item SET stock = 9")]

    @asynccontextmanager
    async def databases(name: str) -> AsyncIterator[Engine]:
        driver = SqliteDriver(tmp_path / name / "sqlite")
        set_up = Settings(data=tmp_path / name, default_spec=sqlite_files.spec_of(source), warm_sandboxes=0)
        running = build_engine(set_up, {"sqlite": driver})
        running.snapshot_value.reuse = KEEPS_ALL
        async with opened(running):
            yield running

    async def go() -> None:
        async with databases("here") as here:
            for statement in statements:
                await sql_walks.ask(here, "a", statement)
            data = await exported(here, "task")
        async with databases("there") as there:
            taken = await there.transfer.take("task", chunks(data))
            assert (taken.snapshots, taken.left_out) == (len(there.snapshots), 0)
            assert taken.snapshots > 1
            outcomes = [(await sql_walks.ask(there, "b", statement))["outcome"] for statement in statements]
            assert outcomes == [Outcome.HIT, Outcome.HIT]
            result = await sql_walks.ask(there, "b", ("query", "SELECT id, stock FROM item"))
            assert (result["outcome"], result["rows"]) == (Outcome.MISS, [[1, 9], [2, 9], [3, 9]])
            assert there.counts.replayed_calls == 0

    asyncio.run(go())


@needs_root
def test_an_imported_tree_replays_without_hosts_outside(tmp_path: Path) -> None:
    """The call that asked a host runs again, and gets from the file what the host said to the first proxy."""
    require_sandboxes()
    spec = EnvironmentSpec(egress=Hosts(hosts=("example.org",)))
    calls = ["cd /root", FETCH.format("example.org/x") + " > f"]

    @asynccontextmanager
    async def reaching(name: str, origin: Origin) -> AsyncIterator[Engine]:
        folder = tmp_path / name
        driver = LocalDriver(folder / "local", None, SourceRules(egress=("example.org",)))
        (folder / "local").mkdir(parents=True)
        (folder / "local" / "origin-port").write_text(str(origin.port))
        driver.machine.egress = EgressGateway(driver.data_dir / "egress", module="tests.sandboxes.egress.origin")
        set_up = Settings(data=folder, default_spec=spec, warm_sandboxes=0, egress=("example.org",))
        running = build_engine(set_up, {"local": driver})
        async with opened(running):
            yield running

    async def go() -> None:
        async with Origin(lambda count: response(f"answer {count}".encode())).running() as origin:
            async with reaching("here", origin) as here:
                await walked(here, "task", [calls])
                data = b"".join(here.transfer.export("task", (await here.tasks.find("task")).tree, recordings=True))
            async with reaching("there", origin) as there:
                await there.transfer.take("task", chunks(data))
                answers = await walked(there, "task", [[*calls, "cat f"]])
                assert [outcome for _, outcome in answers] == [Outcome.MISS] * 3
                assert answers[-1][0]["stdout"] == "answer 1\n"
                assert there.counts.divergences == 0
            assert len(origin.received) == 1

    asyncio.run(go())
