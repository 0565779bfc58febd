"""Trees that are exported and imported, and what an import answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from proxy.engine import Engine
from proxy.tree.rollout import Outcome
from sandboxes.egress.portable_recordings import PortableRecordings
from sandboxes.egress.recordings import Recordings
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import ask, engine
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox


class ReachingDriver(MemoryDriver):
    """A memory driver whose sandboxes have received responses of hosts outside.

    Attributes:
        folder: Their recordings.
        recounted: How often the egress proxy counted the recordings again.
        doubted: How often a recording came that differs from the one that was there.
    """

    def __init__(self, folder: Path, sandbox: type[MemorySandbox] | None = None) -> None:
        super().__init__(sandbox=sandbox)
        self.folder, self.recounted, self.doubted = folder, 0, 0

    def recordings(self, _spec: EnvironmentSpec) -> PortableRecordings:
        return PortableRecordings(self.folder, "scope", self._recount, self._doubt)

    def _doubt(self) -> None:
        self.doubted += 1

    async def _recount(self) -> None:
        self.recounted += 1

    def record(self, number: int, body: bytes) -> None:
        recordings = Recordings(self.folder)
        with recordings.draft() as draft:
            draft.write(body)
            recordings.keep(f"scope-{number:064x}", draft, 200, ())

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


def workload(rollouts: int, calls: int) -> list[list[str]]:
    """Rollouts that share their first half, then part, with looks in between."""
    shared = [part for n in range(calls // 2) for part in (f"X={n}", "cat seed")]
    return [[*shared, *(f"X={rollout}-{n}" for n in range(calls // 2)), "cat seed"] for rollout in range(rollouts)]


async def walked(
    running: Engine, task: str, rollouts: list[list[str]], name: str = "r"
) -> list[tuple[dict[str, Any], Outcome]]:
    opened = await running.tasks.open(task)
    answers = []
    for number, commands in enumerate(rollouts):
        rollout = running.tasks.rollouts.begin(opened, f"{name}{number}", opened.tree, opened.tree.root)
        answers += [await ask(running, rollout, command) for command in commands]
    return answers


async def exported(running: Engine, task: str) -> bytes:
    opened = await running.tasks.find(task)
    running.journal.fold()
    return b"".join(running.transfer.export(task, opened.tree, recordings=True))


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 65536):
        yield data[at : at + 65536]


def verdict(data: bytes, folder: Path, task: str = "task") -> str:
    """Import data into an empty instance; return why it was refused, empty where it was not."""

    async def go() -> str:
        async with engine(folder / "there") as there:
            try:
                await there.transfer.take(task, chunks(data))
            except Exception as error:  # noqa: BLE001 - what it is, is the test's to say
                assert there.store.tasks.get(task) is None
                await there.store.blobs.delete_unused()
                counts = [
                    there.store.database.tables.table(name).count for name in ("nodes", "records", "blobs", "trees")
                ]
                assert counts == [0, 0, 0, 0], "nothing half imported"
                assert list((folder / "there" / "imports").iterdir()) == []
                return str(error)
            return ""

    return asyncio.run(go())
