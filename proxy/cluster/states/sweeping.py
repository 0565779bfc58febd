"""Deletes what the store holds of a task and no kept state needs.

Only the owner of a task deletes its objects. So members do not race, and no clocks are compared:

1. An owner that gives up a state writes so to the log *before* it deletes. If another member owns the task by then, the
   row is refused, and nothing is deleted. So the next owner never relies on what the one before it deletes.
2. An owner writes objects below its own view only. What a replaced owner still writes is named by nothing, because its
   row is refused too.
3. What an owner relies on without having written it belongs to a state of the log. `TaskStates.changing` orders its own
   sends and deletions.
4. An object is deleted `GRACE_S` after this owner first saw that nothing needs it. A database that fails over may have
   lost its last rows, and with them the line that gave a state up. A crash in between only begins the time anew.
"""

import asyncio

import structlog

from proxy.cluster.lines import Unkept
from proxy.cluster.states.fetching import read_manifest
from proxy.cluster.states.imports import DamagedStateError
from proxy.cluster.states.manifests import is_name
from proxy.cluster.states.objects import ObjectStore
from proxy.cluster.states.task_states import TaskStates
from snapshots.store import SnapshotStore

log = structlog.get_logger()

GRACE_S = 600.0
"""How long an object stays that nothing needs, in seconds: longer than the gap that a fail-over leaves."""


class Sweeper:
    """Deletes objects of the tasks that this member owns."""

    def __init__(self, objects: ObjectStore, snapshots: SnapshotStore, *, grace_s: float = GRACE_S) -> None:
        self._objects, self._snapshots, self._grace_s = objects, snapshots, grace_s

    def is_needed(self, states: TaskStates) -> bool:
        """Return whether there may be something to delete, without asking the store."""
        return states.has_garbage or not states.here <= {snapshot.node for snapshot in self._snapshots}

    async def sweep(self, states: TaskStates) -> int:
        """Give up states whose snapshots were evicted here, delete what nothing needs, and return how many objects."""
        async with states.changing:
            await self._give_up_evicted(states)
            needed = await self._needed(states)
            now = asyncio.get_running_loop().time()
            unreachable: set[str] = set()
            async for page in self._objects.names(states.folder + "/"):
                names = (name.removeprefix(states.folder + "/") for name in page)
                unreachable.update(name for name in names if name not in needed and _is_older(name, states))
            since = {name: states.unreachable_since.get(name, now) for name in unreachable}
            due = [name for name, seen in since.items() if now - seen >= self._grace_s]
            states.unreachable_since, states.has_garbage = since, bool(since)
            states.forget_objects(due)
            for name in due:
                # After each deletion, another member may own the task.
                states.owned.require()
                await self._objects.delete([states.path(name)])
                del since[name]
            states.has_garbage = bool(since)
            return len(due)

    async def _give_up_evicted(self, states: TaskStates) -> None:
        have = {snapshot.node for snapshot in self._snapshots}
        evicted = [node for node in states.here - have if node in states.kept]
        states.here &= have
        if evicted:
            await states.owned.write([Unkept(node) for node in evicted])
        for node in evicted:
            states.kept.pop(node, None)
            states.names.pop(node, None)

    async def _needed(self, states: TaskStates) -> set[str]:
        needed: set[str] = set()
        for node, line in tuple(states.kept.items()):
            if node not in states.names:
                try:
                    await read_manifest(self._objects, states, line)
                except DamagedStateError as error:
                    log.warning("a kept state is damaged in the store", node=node, reason=str(error))
                    await states.owned.write([Unkept(node)])
                    states.kept.pop(node, None)
                    continue
            needed |= states.names[node]
        return needed


def _is_older(name: str, states: TaskStates) -> bool:
    """Return whether no later owner has written an object, and whether it is one of ours at all."""
    return is_name(name) and int(name.partition("/")[0]) <= states.owned.view
