"""One import of a driver that states of a tree share, so that what they have in common is fetched and written once."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from proxy.cluster.states.manifests import CHUNK_BYTES, ChunkRef, ManifestError, StateManifest, require_intact
from proxy.cluster.states.objects import MissingObjectError, ObjectSizeError, ObjectStore
from proxy.cluster.states.task_states import TaskStates
from proxy.transfer.state_records import UnitRef
from sandboxes.driver import FrozenState
from sandboxes.portability import NotPortableError, Porter, Unpacking
from sandboxes.task_owner import TaskOwner

GETS = 4
"""How many chunks of a unit are read at once."""


class DamagedStateError(Exception):
    """The store has lost or damaged an object of a state."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name  # Name of the object, relative to the task's objects.


class StateImport:
    """Fetches states into a driver. The driver keeps their units until `close`, and those of snapshots afterwards."""

    def __init__(self, states: TaskStates, porter: Porter, objects: ObjectStore, folder: Path) -> None:
        self._states, self._objects, self._folder = states, objects, folder
        self.users, self.used_at, self.size_bytes = 0, time.monotonic(), 0
        self._units: dict[
            str, tuple[str, asyncio.Task[None]]
        ] = {}  # By name: the digest, and the task that fetches it.
        self._writing = asyncio.Lock()
        self._tasks = TaskOwner()
        with ExitStack() as stack:
            self._unpacking: Unpacking = stack.enter_context(porter.unpacking())
            self._stack = stack.pop_all()

    def fits(self, manifest: StateManifest) -> bool:
        """Return whether the units of a state are not other ones under the same names: members choose names."""
        units = manifest.state.units
        return all(self._units[unit.name][0] == unit.sha256 for unit in units if unit.name in self._units)

    def close(self) -> None:
        """End the import. No request may be using it."""
        self._tasks.cancel()
        self._stack.close()

    async def fetch(self, manifest: StateManifest) -> FrozenState:
        """Return a state as this machine's driver has it. Raises DamagedStateError, NotPortableError."""
        self.users += 1
        try:
            pairs = zip(manifest.state.units, manifest.chunks, strict=True)
            await asyncio.gather(*(self._unit(unit, chunks) for unit, chunks in pairs))
            async with self._writing:
                return await asyncio.to_thread(self._unpacking.state, manifest.state.frozen())
        finally:
            self.users -= 1
            self.used_at = time.monotonic()

    async def _unit(self, unit: UnitRef, chunks: Sequence[ChunkRef]) -> None:
        if unit.name not in self._units:
            work = self._fetch_unit(unit, chunks)
            self._units[unit.name] = unit.sha256, self._tasks.spawn("fetch a unit", work, awaited=True)
        known = self._units[unit.name]
        try:
            # Several states may wait for it.
            await asyncio.shield(known[1])
        except BaseException:
            if known[1].done() and self._units.get(unit.name) is known:
                # Not cancelled by this caller alone: it failed, and a later state tries again.
                del self._units[unit.name]
            raise

    async def _fetch_unit(self, unit: UnitRef, chunks: Sequence[ChunkRef]) -> None:
        with TemporaryFile(dir=self._folder) as file:
            for start in range(0, len(chunks), GETS):
                group = chunks[start : start + GETS]
                for data in await asyncio.gather(*map(self._chunk, group)):
                    await asyncio.to_thread(file.write, data)
                self._states.note_chunks(group)
            self.size_bytes += unit.size_bytes
            async with self._writing:
                await asyncio.to_thread(self._write, unit, file)

    def _write(self, unit: UnitRef, file: BinaryIO) -> None:
        file.seek(0)
        try:
            self._unpacking.part(unit.name, file, unit.sha256)
        except NotPortableError as error:
            raise DamagedStateError(unit.name, str(error)) from error

    async def _chunk(self, chunk: ChunkRef) -> bytes:
        try:
            data = await self._objects.get(
                self._states.path(chunk.name), most_bytes=CHUNK_BYTES, size_bytes=chunk.size_bytes
            )
            require_intact(chunk.name, data)
        except (MissingObjectError, ObjectSizeError, ManifestError) as error:
            raise DamagedStateError(chunk.name, str(error)) from error
        return data
