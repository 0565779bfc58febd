"""Backups of several workers, restored for the same, another, and one worker: all answers and states are there."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.engine import Engine
from proxy.shares import Share
from proxy.storage.backup import STATES
from proxy.storage.data_dir import directory_of, workers_of
from proxy.storage.errors import StoreError
from proxy.transfer.backup import restore
from proxy.transfer.format import Writer, read
from proxy.tree.rollout import Outcome
from proxy.workers.streams import ResponsePart, joined_backup
from sandboxes.listener import Listener
from tests.proxy.rig import SPEC, ask, engine
from tests.proxy.transfer.rig import walked
from tests.proxy.transfer.test_backup import backup_of

WORKERS = 2
TASKS = [f"task-{number}" for number in range(8)]
OF_FIRST = [task for task in TASKS if Share(0, WORKERS).has(task)]
SHARING = [OF_FIRST[0], next(task for task in OF_FIRST if not Share(Share(0, 3).worker_of(OF_FIRST[0]), 3).has(task))]
"""Two tasks of one worker, which share a tree, and belong to different ones of three."""
SHARED = SPEC.model_copy(update={"shared": True, "files": {"/root/seed": "shared\n"}})
COMMANDS = ["echo 1 > f", "X=1", "cat f"]


async def part_of(data: bytes) -> ResponsePart:
    """Return a worker's part of a backup, in two pieces."""

    async def request(listener: Listener) -> None:
        await listener.head(200, ())
        for piece in (data[:1000], data[1000:]):
            await listener.data(piece)

    return await ResponsePart.begun(request)


def commands(task: str) -> list[str]:
    return [f"echo {task} > g", *COMMANDS]


async def fill(running: Engine, share: Share) -> None:
    for task in filter(share.has, TASKS):
        if task in SHARING:
            running.store.tasks.put(task, SHARED.model_dump_json())
        await walked(running, task, [commands(task)])


async def whole_backup(folder: Path) -> bytes:
    parts = []
    for number in range(WORKERS):
        async with engine(folder / f"old-{number}") as running:
            await fill(running, Share(number, WORKERS))
            (folder / f"copies-{number}").mkdir()
            parts.append(await part_of(await backup_of(running, folder / f"copies-{number}")))
    return b"".join([piece async for piece in joined_backup(parts)])


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "backup").write_bytes(asyncio.run(whole_backup(folder)))
    return folder / "backup"


def directories(data: Path, workers: int) -> Sequence[Path]:
    return [data] if workers == 1 else [directory_of(data, number) for number in range(workers)]


async def check(data: Path, workers: int) -> int:
    """Check that each task's calls are known where the task belongs; return the number of snapshots."""
    snapshots = 0
    for number, directory in enumerate(directories(data, workers)):
        async with engine(directory) as running:
            assert not (directory / STATES).exists()
            snapshots += len(running.snapshots)
            known = {name for name, _ in running.store.tasks.all()}
            assert known == set(filter(Share(number, workers).has, TASKS))
            for task in known:
                opened = await running.tasks.open(task)
                rollout = running.tasks.rollouts.begin(opened, "new", opened.tree, opened.tree.root)
                assert [(await ask(running, rollout, each))[1] for each in commands(task)] == [Outcome.HIT] * 4
                # A call that leaves the tree finds the state of its node.
                assert (await ask(running, rollout, "cat g"))[0]["stdout"] == f"{task}\n"
            assert running.counts.replayed_calls == 0
    return snapshots


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_all_is_there_for_any_number_of_workers(backup: Path, tmp_path: Path, workers: int | None) -> None:
    """Rows of two workers have the same numbers; they stay apart, and states stay those of their nodes."""
    restored = restore(backup, tmp_path / "data", workers=workers)
    assert (restored.tasks, restored.lost_rollouts) == (8, 8)
    assert restored.snapshots > 0
    assert workers_of(tmp_path / "data") == (None if workers == 1 else workers or WORKERS)
    assert asyncio.run(check(tmp_path / "data", workers or WORKERS)) >= restored.snapshots


def test_incomplete_backup_is_refused(backup: Path, tmp_path: Path) -> None:
    """A file that lacks a worker, or is cut off, leaves nothing."""
    writer, cut = Writer(), tmp_path / "cut"
    forged = b""
    with backup.open("rb") as reading:
        for part in read(reading):
            if part.kind == "part" and b"worker-1" in part.data:
                break
            forged += writer.part(part.kind, part.stored)
    for data in (forged + writer.seal(), backup.read_bytes()[:-2000]):
        cut.write_bytes(data)
        with pytest.raises(StoreError, match="is damaged"):
            restore(cut, tmp_path / "data")
        assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["lock"]
