"""E2B's snapshots: pinned nodes of the tree."""

import contextlib
import re
from dataclasses import replace
from typing import Any

from proxy.compat.e2b.control_requests import ControlRequest, name_field, page, require_memory
from proxy.compat.e2b.responses import json_response
from proxy.compat.e2b.sandbox_registry import RunningSandbox, SandboxRegistry
from proxy.compat.endpoints import EndpointContext
from proxy.dialects.base import Local
from proxy.refusals import RefusalError
from proxy.tree.task import Task
from proxy.tree.tree import Node, Tree
from sandboxes.errors import NotFreezableError

_SNAPSHOT_ID = re.compile(r"n([0-9]{1,18})")


def is_snapshot(template: str) -> bool:
    """Return whether a template ID is the ID of a snapshot."""
    return _SNAPSHOT_ID.fullmatch(template) is not None


class SandboxSnapshots:
    """Makes, lists and deletes the snapshots of all tasks. A snapshot's ID is `n` and the number of its node."""

    def __init__(self, context: EndpointContext, registry: SandboxRegistry) -> None:
        self._context, self._registry = context, registry

    def node(self, task: Task, snapshot: str) -> tuple[Tree, Node]:
        """Return the node of a snapshot, with its tree. Raises RefusalError (404) if the task has no such node."""
        match = _SNAPSHOT_ID.fullmatch(snapshot)
        position = None if match is None else self._context.tasks.position(task, int(match[1]))
        if position is None:
            raise RefusalError(404, "no-such-snapshot", f"snapshot {snapshot!r} was not found in task {task.name!r}")
        return position

    async def create(self, sandbox: RunningSandbox, request: ControlRequest) -> Local:
        """Snapshot the state of a sandbox, and pin its node, so that it is never evicted."""
        require_memory(request.body)
        rollout = sandbox.rollout
        async with self._context.step.order.hold(rollout):
            node = rollout.node
        # Pin first: the snapshot may wait for a sandbox longer than the client waits, and a retry then profits.
        self._context.pin(rollout.tree, node, on=True)
        # A state that cannot be frozen is still reachable: its calls are replayed.
        with contextlib.suppress(NotFreezableError):
            await self._context.restorer.take_snapshot(rollout.tree, node)
        name = name_field(request.body, "name")
        snapshot = {"snapshotID": f"n{node.id}", "names": [name] if name else []}
        note = self._registry.note(rollout)
        self._registry.write(rollout, replace(note, snapshots=[*note.snapshots, snapshot]))
        return json_response(snapshot, 201)

    async def list(self, task: str, query: dict[str, str]) -> Local:
        """List the snapshots of a task, or of the sandbox or the name in the query."""
        opened = await self._context.tasks.open(task)
        snapshots: list[dict[str, Any]] = []
        for rollout in opened.rollouts.values():
            if query.get("sandboxID", rollout.name) == rollout.name:
                snapshots += [entry for entry in self._registry.note(rollout).snapshots if entry not in snapshots]
        if query.get("name"):
            snapshots = [snapshot for snapshot in snapshots if query["name"] in snapshot["names"]]
        return page(snapshots, query)

    async def delete(self, task: str, template: str) -> Local:
        """Delete a snapshot: unpin its node, and forget it in the notes of all sandboxes."""
        if not is_snapshot(template):
            raise RefusalError(
                404, "no-such-template", f"template {template!r} was not found: only snapshots can be deleted."
            )
        opened = await self._context.tasks.open(task)
        self._context.pin(*self.node(opened, template), on=False)
        for rollout in opened.rollouts.values():
            note = self._registry.note(rollout)
            kept = [snapshot for snapshot in note.snapshots if snapshot["snapshotID"] != template]
            if len(kept) < len(note.snapshots):
                self._registry.write(rollout, replace(note, snapshots=kept))
        return Local(204, headers=())
