"""Backups with snapshots: a restored directory answers and restores as the old one did; damage is found."""

import asyncio
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.engine import Engine
from proxy.storage.backup import STATES, back_up, known_nodes
from proxy.storage.errors import StoreError
from proxy.transfer.backup import pieces, restore
from proxy.transfer.format import Writer, read
from sandboxes.linux.files import remove_tree
from sandboxes.spec import EnvironmentSpec
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes
from tests.proxy.rig import engine
from tests.proxy.transfer.rig import ReachingDriver, walked
from tests.sandboxes import sqlite_files
from tests.sandboxes.box import needs_root
from tests.sandboxes.image_archives import bash_image
from tests.sandboxes.local.test_states import small_base
from tests.sandboxes.memory_driver import MemoryDriver

SHELL = [("shell/exec", {"command": command}) for command in ("echo one > f", "X=1", "echo two >> f")]
SQL = [("sql/query", {"sql": sql}) for sql in ("DELETE FROM item WHERE id > 3", "UPDATE item SET stock = 9")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a disk that overlayfs takes."""
    made = Path(tempfile.mkdtemp(prefix="forkpoint-backups-", dir="/var/tmp"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        remove_tree(made)


def call(proxy: Proxy, task: str, rollout: str, made: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Make a call; return how it was answered, and the answer."""
    response = proxy.client.post(f"/t/{task}/r/{rollout}/{made[0]}", json=made[1])
    assert response.is_success, response.text
    return response.headers["cache-status"], response.json()


def moved(folder: Path, specs: dict[str, Any], calls: dict[str, list[Any]], **settings: Any) -> tuple[Path, int]:
    """Make calls, back the proxy up and restore; return the restored directory, and how many snapshots came along."""
    with real_proxy(kept=folder / "old", **settings) as proxy:
        for task, spec in specs.items():
            proxy.put(task, **spec)
            for made in calls[task]:
                call(proxy, task, "a", made)
            node = proxy.client.get(f"/api/v1/tasks/{task}/rollouts/a").json()["node"]
            # Kept after the call; this waits for it.
            proxy.client.post(f"/api/v1/tasks/{task}/nodes/{node}/snapshot").raise_for_status()
        backup = proxy.client.get("/api/v1/backup", params={"snapshots": True}).raise_for_status()
    (folder / "backup").write_bytes(backup.content)
    return folder / "new", restore(folder / "backup", folder / "new").snapshots


def leave(proxy: Proxy, task: str, calls: list[Any], last: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Make the recorded calls, all of which hit, and then one that leaves the tree; return its answer."""
    assert [call(proxy, task, "b", made)[0] for made in calls] == ["forkpoint; hit"] * len(calls)
    status, answer = call(proxy, task, "b", last)
    assert status == "forkpoint; fwd=miss; stored"
    assert proxy.client.get("/api/v1/stats").json()["replayed_calls"] == 0
    return answer


@needs_root
def test_restored_directory_needs_no_replay(folder: Path, tmp_path: Path) -> None:
    """States of files, sessions and databases come along."""
    require_sandboxes()
    (folder / "old").mkdir()
    source = str(sqlite_files.make(tmp_path / "shop.db"))
    base = small_base(tmp_path / "base")
    (base / "bin" / "mkdir").write_bytes(Path("/bin/mkdir").read_bytes())
    (base / "bin" / "mkdir").chmod(0o755)
    specs = {
        "files": {"base": str(base), "files": {"/root/seed": "seed\n"}},
        "data": {"driver": "sqlite", "databases": {"main": {"source": source}}},
    }
    calls = {"files": SHELL, "data": SQL}
    new, snapshots = moved(folder, specs, calls)
    with real_proxy(kept=new) as proxy:
        assert proxy.client.get("/api/v1/stats").json()["snapshots"] == snapshots >= 2
        assert not (new / STATES).exists()
        assert leave(proxy, "files", SHELL, ("shell/exec", {"command": "echo $X; cat f"}))["stdout"] == "1\none\ntwo\n"
        rows = leave(proxy, "data", SQL, ("sql/query", {"sql": "SELECT id, stock FROM item"}))["rows"]
    assert rows == [[1, 9], [2, 9], [3, 9]]


@needs_root
def test_restored_states_of_an_image_need_no_replay(folder: Path) -> None:
    require_sandboxes()
    (folder / "old").mkdir()
    new, snapshots = moved(folder, {"box": {"image": bash_image()}}, {"box": SHELL})
    assert snapshots >= 1
    with real_proxy(kept=new) as proxy:
        assert leave(proxy, "box", SHELL, ("shell/exec", {"command": "echo $X; cat f"}))["stdout"] == "1\none\ntwo\n"


def on_memory(data: Path, act: Callable[[Engine], Any]) -> Any:
    async def go() -> Any:
        async with engine(data) as running:
            return await act(running)

    return asyncio.run(go())


async def walked_backup(running: Engine, folder: Path) -> bytes:
    await walked(running, "task", [["echo 1 > f", "X=1", "cat f"]])
    return await backup_of(running, folder)


async def backup_of(running: Engine, folder: Path) -> bytes:
    await running.capture.drain()
    running.journal.fold()
    copy = folder / "copy"
    back_up(running.store.database, copy)
    nodes = known_nodes(copy, [snapshot.node for snapshot in running.snapshots])
    with running.transfer.lend_all_states() as states:
        return b"".join(pieces(copy.open("rb"), states, nodes))


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("old")

    data: bytes = on_memory(folder / "data", lambda running: walked_backup(running, folder))
    return data


def restored(data: bytes, folder: Path) -> int:
    (folder / "backup").write_bytes(data)
    return restore(folder / "backup", folder / "data").snapshots


def test_states_of_restored_nodes_are_adopted(backup: bytes, tmp_path: Path) -> None:
    """A second start finds them where the first one has put them."""
    count = restored(backup, tmp_path)
    assert count >= 2

    async def kept(running: Engine) -> int:
        return len(running.snapshots)

    assert [on_memory(tmp_path / "data", kept) for _ in range(2)] == [count, count]


def test_recordings_of_hosts_are_adopted_with_states(tmp_path: Path) -> None:
    here, there = ReachingDriver(tmp_path / "a"), ReachingDriver(tmp_path / "b")
    here.record(1, b"from outside")

    async def backed_up() -> None:
        async with engine(tmp_path / "old", here) as running:
            (tmp_path / "backup").write_bytes(await walked_backup(running, tmp_path))
        restore(tmp_path / "backup", tmp_path / "new")
        async with engine(tmp_path / "new", there):
            assert (there.files(), there.recounted) == (here.files(), 1)

    asyncio.run(backed_up())


def test_states_of_another_environment_are_left_out(
    backup: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that differs here would make other states of the same layers."""
    restored(backup, tmp_path)

    async def kept(running: Engine) -> int:
        return len(running.snapshots)

    async def another(_: MemoryDriver, spec: EnvironmentSpec) -> str:  # noqa: ARG001
        return "another base"

    monkeypatch.setattr(MemoryDriver, "identity", another)
    assert on_memory(tmp_path / "data", kept) == 0
    assert not (tmp_path / "data" / STATES).exists()


def test_any_flipped_bit_refuses_a_backup(backup: bytes, tmp_path: Path) -> None:
    """The directory stays empty. Every part has a digest, and the seal covers all."""
    for number, position in enumerate(range(600, len(backup), len(backup) // 12)):
        damaged = bytearray(backup)
        damaged[position] ^= 1
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(StoreError, match="is damaged"):
            restored(bytes(damaged), folder)
        assert [entry.name for entry in (folder / "data").iterdir()] == ["lock"]
    with pytest.raises(StoreError, match="is damaged"):
        restored(backup[: len(backup) // 2], tmp_path)


def test_state_of_another_node_refuses_a_backup(backup: bytes, tmp_path: Path) -> None:
    """Digests that are right do not help: the state must be that of its node in the store."""
    outer = Writer()
    forged, unit = b"", ""
    for part in read(io.BytesIO(backup)):
        if part.kind == "part":
            unit = orjson.loads(part.data)["name"]
        if part.kind == "seal":
            break
        if part.kind == "chunk" and unit.startswith("tree-"):
            continue
        forged += outer.part(part.kind, part.stored)
    inner, first = Writer(), 0
    for part in read(io.BytesIO(unit_bytes(backup, unit))):
        data = part.stored
        if part.kind == "seal":
            break
        if part.kind == "snapshot":
            line = orjson.loads(data)
            first = first or line["node"]
            data = orjson.dumps(line | {"node": first + 1 if line["node"] == first else first})
        forged += outer.part("chunk", inner.part(part.kind, data))
    forged += outer.part("chunk", inner.seal()) + outer.seal()
    with pytest.raises(StoreError, match="the digest of this state is not that of node"):
        restored(forged, tmp_path)


def unit_bytes(backup: bytes, name: str) -> bytes:
    """Return the bytes of a unit of a backup."""
    found, unit = b"", ""
    for part in read(io.BytesIO(backup)):
        if part.kind == "part":
            unit = orjson.loads(part.data)["name"]
        elif part.kind == "chunk" and unit == name:
            found += part.data
    return found


def test_export_is_no_backup(bundle: bytes, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Use `forkpoint import`"):
        restored(bundle, tmp_path)
