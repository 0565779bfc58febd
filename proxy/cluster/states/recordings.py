"""Recordings of hosts outside in the store: what a call received is there before the call is answered.

Theory of operation. A recording is a part of the states of its tree: the next owner must give programs the same bytes
when it replays, and must not ask the host again.

1. Before the record of an executed call is written, each recording of the call's environment that the store lacks goes
   there. If that fails, the call fails and is not recorded.
2. Before the first sandbox of a tree is leased here, the recordings of the tree come from the store. If that fails, the
   call fails.
3. An owner writes below its own view. A replaced owner may still write, after the next one has read; its record is
   refused, so nothing depends on what it received. Of two recordings of one request, the later view's counts.
4. Nothing deletes them: any record of the tree may depend on them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import structlog

from proxy.cluster.states.objects import MissingObjectError, ObjectSizeError, ObjectStore, ObjectStoreError
from proxy.cluster.states.task_states import StatesOf, TaskStates
from proxy.engine import Engine
from proxy.tree.tree import Tree
from sandboxes.errors import SandboxError
from sandboxes.portability import NotPortableError, RecordingPorter, recording_porter_of

log = structlog.get_logger()

MOST_BYTES = 160 << 20
"""Largest recording that is read: the largest response with its head (`sandboxes.egress.recordings`)."""


class SharedRecordings:
    """Sends and fetches the recordings of the tasks that this member owns."""

    def __init__(self, objects: ObjectStore, engine: Engine, states_of: StatesOf, folder: Path) -> None:
        """Connect the store with an engine that is not open yet; see `Fetcher` for the arguments."""
        self._objects, self._engine, self._states_of, self._folder = objects, engine, states_of, folder

    async def send(self, tree: Tree) -> None:
        """Write what the store lacks of a tree's recordings. Raises SandboxError: the store does not take one."""
        states, porter = self._states_of(tree.id), self._porter(tree)
        if states is None or porter is None:
            return
        async with states.recording, _required():
            known = await self._known(states, tree, porter)
            for name in await asyncio.to_thread(porter.names):
                if name not in known and (data := await asyncio.to_thread(_packed, porter, name)) is not None:
                    await self._objects.put(states.path(f"{_folder(tree)}/{states.owned.view}/{name}"), data)
                    self._engine.counts.states.bytes_sent += len(data)
                    known.add(name)

    async def fetch(self, tree: Tree) -> None:
        """Have the recordings of a tree here before its first sandbox. Raises SandboxError."""
        states, porter = self._states_of(tree.id), self._porter(tree)
        if states is not None and porter is not None and tree.id not in states.recordings:
            async with states.recording, _required():
                await self._known(states, tree, porter)

    def _porter(self, tree: Tree) -> RecordingPorter | None:
        return recording_porter_of(self._engine.drivers.get(tree.spec.driver), tree.spec)

    async def _known(self, states: TaskStates, tree: Tree, porter: RecordingPorter) -> set[str]:
        """Return the names of the recordings that the store has of a tree; the first time, they are fetched."""
        if tree.id not in states.recordings:
            views = dict[str, int]()
            folder = states.path(_folder(tree))
            async for page in self._objects.names(f"{folder}/"):
                for path in page:
                    number, _, name = path.removeprefix(f"{folder}/").partition("/")
                    views[name] = max(views.get(name, 0), int(number))
            for name, view in views.items():
                await self._take(porter, name, f"{folder}/{view}/{name}")
            if views:
                await porter.settle()
                log.info("recordings of hosts were fetched", task=states.owned.task, tree=tree.id, count=len(views))
            states.recordings[tree.id] = set(views)
        return states.recordings[tree.id]

    async def _take(self, porter: RecordingPorter, name: str, path: str) -> None:
        data = await self._objects.get(path, most_bytes=MOST_BYTES)
        file = self._folder / uuid4().hex
        try:
            await asyncio.to_thread(file.write_bytes, data)
            await asyncio.to_thread(porter.take, name, file)
        except NotPortableError as error:
            # Its request is made again, and the rules for replays decide.
            self._engine.counts.failure("damaged-state")
            log.warning("a recording of a host is damaged in the store", path=path, reason=str(error))
        finally:
            file.unlink(missing_ok=True)
        self._engine.counts.states.bytes_fetched += len(data)


@asynccontextmanager
async def _required() -> AsyncIterator[None]:
    """Let the call fail whose recordings the store does not take or give."""
    try:
        yield
    except (ObjectStoreError, MissingObjectError, ObjectSizeError, OSError) as error:
        raise SandboxError(
            f"what hosts outside have sent is not in the store of the cluster: {error}. Try again."
        ) from error


def _folder(tree: Tree) -> str:
    return f"recordings/{tree.id}"


def _packed(porter: RecordingPorter, name: str) -> bytes | None:
    """Return the bytes of a recording; None if it was removed meanwhile, or is damaged. Blocking."""
    try:
        return b"".join(porter.pack(name))
    except (OSError, ValueError):
        return None
