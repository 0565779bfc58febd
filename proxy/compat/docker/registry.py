"""Docker's containers of each task: found by name or ID, and stored beside the rollouts that they are."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.compat.docker.containers import Container, ContainerChange, ContainerState, ShownContainers
from proxy.compat.docker.output import OutputListener
from proxy.compat.docker.requests import ContainerSpec
from proxy.compat.docker.stream import StreamConnection
from proxy.execution.tasks import Tasks
from proxy.refusals import RefusalError
from proxy.storage.store import Store
from proxy.tree.rollout import Rollout

_STORED = ("id", "name", "owner", "created_at", "state", "exit_code", "started_at", "finished_at")
_STORED_OF_SPEC = ("image", "image_id", "main", "user", "tty", "stdin", "auto_remove", "background", "body")
"""Attributes of a container's spec that are stored, below the member `made`."""
_STORED_OF_MEMBER = ("project", "service")
"""Attributes that only the containers of projects have. Older versions of Forkpoint do not know them."""
_PROTOCOL = "docker"
KILLED_EXIT_CODE = 137
"""Exit code of a stopped container, as Docker reports it for SIGKILL: 128 + 9."""


@dataclass(slots=True, eq=False)
class ContainerActivity:
    """What is under way in a container. It concerns connections, so it is not stored."""

    main: OutputListener | None = None  # The listener of the main command; None while that does not run.
    running: set[OutputListener] = field(default_factory=set)  # The listeners of the execs that run.
    # The connections that are attached to the main command, and the streams that each wants.
    attached: list[tuple[StreamConnection, frozenset[int]]] = field(default_factory=list)
    stdin: StreamConnection | None = None  # The connection that sends the main command's stdin.
    log: bytes | None = None  # The recorded result of the main command; None before its end.
    # Set when the container exits; replaced when it is started again.
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    removed: asyncio.Event = field(default_factory=asyncio.Event)  # Set when the container is removed.

    def detach(self) -> None:
        """Detach every running process, so that the rollout's next call does not wait for it."""
        for listener in (*self.running, *([self.main] if self.main is not None else [])):
            listener.detach()


class ContainerRegistry:
    """The containers of all tasks. A task's containers are read from the store when the task is first used."""

    def __init__(self, store: Store, tasks: Tasks) -> None:
        self._store, self._tasks = store, tasks
        self._by_task: dict[str, dict[str, Container]] = {}
        self._activities: dict[str, ContainerActivity] = {}

    def is_loaded(self, task: str) -> bool:
        """Return whether a task's containers are in memory."""
        return task in self._by_task

    async def load(self, task: str) -> None:
        """Read a task's containers from the store, once."""
        await self._tasks.open(task)
        # Checked again: another request may have loaded them during the await.
        if task not in self._by_task:
            notes = self._store.notes.of_task(task, _PROTOCOL)
            containers = [container for rollout, note in notes.items() for container in _decode(task, rollout, note)]
            self._by_task[task] = {container.id: container for container in containers}

    def forget(self, task: str) -> None:
        """Forget a task that another proxy may change from now on; it is read again when it is used."""
        for container in self._by_task.pop(task, {}).values():
            activity = self._activities.pop(container.id, None)
            if activity is not None:
                activity.detach()

    def of(self, shown: ShownContainers) -> list[Container]:
        """Return the containers that a client is shown; without an owner, those that were created without one."""
        return [container for container in self._by_task[shown.task].values() if shown.includes(container)]

    def find(self, to: ShownContainers, name: str) -> Container:
        """Return the container with this ID, name or beginning of an ID. Raises RefusalError (404) if it is not one."""
        shown = self.of(to)
        # Docker's order: a full ID or a name wins over the beginning of an ID.
        exact = [container for container in shown if name in {container.id, container.name, f"/{container.name}"}]
        matches = exact or [container for container in shown if name and container.id.startswith(name)]
        if len(matches) != 1:
            raise RefusalError(404, "docker", f"No such container: {name}")
        return matches[0]

    def rollout(self, container: Container) -> Rollout | None:
        """Return the rollout of a container; None if it is not in memory."""
        return self._tasks.rollouts.running.get((container.task, container.rollout))

    async def require_rollout(self, container: Container) -> Rollout:
        """Return a container's rollout. If another protocol finished it, remove the container and raise a 404."""
        rollout = await self._tasks.running(container.task, container.rollout)
        if rollout is None:
            self.drop(container)
            raise RefusalError(404, "docker", f"No such container: {container.id}")
        return rollout

    def rollout_names(self, task: str) -> Iterator[str]:
        """Return the names of the rollouts that are containers of a task."""
        return (container.rollout for container in self._by_task[task].values() if container.rollout)

    def of_rollout(self, rollout: Rollout) -> list[Container]:
        """Return the containers that a rollout is: one, or those of a project."""
        containers = self._by_task.get(rollout.task, {}).values()
        return [container for container in containers if container.rollout == rollout.name]

    def project(self, task: str, owner: str, project: str) -> list[Container]:
        """Return the containers of a project."""
        return [container for container in self.of(ShownContainers(task, owner)) if container.project == project]

    def activity(self, container: Container) -> ContainerActivity:
        """Return what is under way in a container."""
        return self._activities.setdefault(container.id, ContainerActivity())

    def add(self, container: Container) -> None:
        """Add a new container, and store it."""
        self._by_task[container.task][container.id] = container
        self.save(container)

    def save(self, container: Container) -> None:
        """Store a container. Without its rollout there is nothing to store it beside."""
        rollout = self.rollout(container)
        if rollout is None:
            return
        if container.project:
            members = self.project(container.task, container.owner, container.project)
            note: Any = [_encode(member) for member in members]
        else:
            note = _encode(container)
        self._tasks.rollouts.note(rollout, _PROTOCOL, orjson.dumps(note).decode())

    async def remove(self, container: Container) -> None:
        """Remove a container and, with the last one of a project, finish its rollout, once running calls have ended."""
        # A running command would keep the turn to its end.
        self.activity(container).detach()
        others = self.project(container.task, container.owner, container.project) if container.project else []
        others = [other for other in others if other is not container and other.rollout == container.rollout]
        if container.is_planned or others:
            self.drop(container)
            for other in others[:1]:
                self.save(other)
            return
        # A rollout that has lost its position can still be removed.
        if not await self._tasks.dismiss(container.task, container.rollout):
            rollout = await self._tasks.running(container.task, container.rollout)
            if rollout is not None:
                await self._tasks.rollouts.finish_in_turn(rollout)
        self.drop(container)

    def drop(self, container: Container) -> None:
        """Forget a container, which may be forgotten already."""
        self._by_task[container.task].pop(container.id, None)
        container.change(ContainerChange.REMOVE)
        activity = self._activities.pop(container.id, ContainerActivity())
        # Wakes the clients that wait for either event; the container itself is forgotten.
        activity.exited.set()
        activity.removed.set()


def _encode(container: Container) -> dict[str, Any]:
    names = (*_STORED, *(_STORED_OF_MEMBER if container.project else ()))
    note = {name: getattr(container, name) for name in names}
    note["made"] = {name: getattr(container.spec, name) for name in _STORED_OF_SPEC}
    return note


def _decode(task: str, rollout: str, text: str) -> list[Container]:
    """Read what is stored beside a rollout: a container, or a list of those of a project."""
    note: Any = orjson.loads(text)
    return [_decode_one(task, rollout, fields) for fields in (note if isinstance(note, list) else [note])]


def _decode_one(task: str, rollout: str, note: dict[str, Any]) -> Container:
    # The stored name of the spec is `made`.
    stored = note.pop("made")
    spec = ContainerSpec(**{**stored, "main": tuple(stored["main"])})
    container = Container(task=task, rollout=rollout, spec=spec, **{**note, "state": ContainerState(note["state"])})
    if container.is_running and spec.main and not spec.background and not container.project:
        # The client of the main command was connected to a process that is gone, as after a crash of a Docker daemon.
        container.change(ContainerChange.EXIT)
        container.exit_code = KILLED_EXIT_CODE
    return container
