"""Docker's containers of each task: found by name or id, kept over a restart beside the rollouts that they are."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.compat.docker.requests import Created
from proxy.compat.docker.responses import Container
from proxy.compat.docker.stream import Audience, HijackedConnection
from proxy.execution.tasks import Tasks
from proxy.refusals import RefusalError
from proxy.storage.store import Store
from proxy.tree.rollout import Rollout

_KEPT = ("id", "name", "owner", "created_at", "state", "exit_code", "started_at", "finished_at")
_OF_BODY = ("image", "image_id", "main", "user", "tty", "stdin", "auto_remove", "background", "body")
_PROTOCOL = "docker"
KILLED = 137
EXECS = 256
"""Instances that a container remembers: the last ones."""


@dataclass(slots=True, eq=False)
class Life:
    """What is under way in a container: who hears its processes, and who waits for its end.

    main: who hears its main command. attached: the connections that want that before it is started; stdin: the one that
    has its input. log: the main command's answer.
    """

    main: Audience | None = None
    running: set[Audience] = field(default_factory=set)
    attached: list[tuple[HijackedConnection, frozenset[int]]] = field(default_factory=list)
    stdin: HijackedConnection | None = None
    log: bytes | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    removed: asyncio.Event = field(default_factory=asyncio.Event)

    def detach(self) -> None:
        """Detach every running process, so that the rollout's next call does not wait for it."""
        for audience in (*self.running, *([self.main] if self.main is not None else [])):
            audience.detach()


class Containers:
    """All that running rollouts are containers, by task; a task's are read back when they are first asked for."""

    def __init__(self, store: Store, tasks: Tasks) -> None:
        self._store, self._tasks = store, tasks
        self._by_task: dict[str, dict[str, Container]] = {}
        self._lives: dict[str, Life] = {}

    def known(self, task: str) -> bool:
        """Whether a task's containers are in memory."""
        return task in self._by_task

    async def load(self, task: str) -> None:
        """Read a task's containers back."""
        await self._tasks.open(task)
        if task not in self._by_task:
            notes = self._store.rollouts.notes(task, _PROTOCOL)
            found = [_read(task, name, orjson.loads(note)) for name, note in notes.items()]
            self._by_task[task] = {container.id: container for container in found}

    async def standing(self, container: Container) -> Rollout:
        """Return the rollout that a container is.

        Raises:
            Refused: 404, it has been finished otherwise; then so is the container.
        """
        rollout = await self._tasks.running(container.task, container.rollout)
        if rollout is None:
            self._drop(container)
            raise RefusalError(404, "docker", f"No such container: {container.id}")
        return rollout

    def of(self, task: str, owner: str) -> list[Container]:
        """Return the containers that this URL shows: the task's, or those of the one rollout that it names."""
        return [one for one in self._by_task[task].values() if one.owner == owner]

    def find(self, task: str, owner: str, name: str) -> Container:
        """Return the container of this id, name, or beginning of an id.

        Raises:
            Refused: 404, there is none, or several begin so.
        """
        mine = self.of(task, owner)
        exact = [one for one in mine if name in {one.id, one.name, f"/{one.name}"}]
        found = exact or [one for one in mine if name and one.id.startswith(name)]
        if len(found) != 1:
            raise RefusalError(404, "docker", f"No such container: {name}")
        return found[0]

    def rollout(self, container: Container) -> Rollout | None:
        """Return a container's rollout if it is in memory."""
        return self._tasks.rollouts.get((container.task, container.rollout))

    def life(self, container: Container) -> Life:
        """Return what is under way in a container."""
        return self._lives.setdefault(container.id, Life())

    def add(self, container: Container) -> None:
        """Take a new container in."""
        self._by_task[container.task][container.id] = container
        self.save(container)

    def save(self, container: Container) -> None:
        """Write what a restart must find again."""
        rollout = self.rollout(container)
        if rollout is None:
            return
        told = {name: getattr(container, name) for name in _KEPT}
        told["made"] = {name: getattr(container.made, name) for name in _OF_BODY}
        self._store.rollouts.put_note(rollout.id, _PROTOCOL, orjson.dumps(told).decode())

    async def remove(self, container: Container) -> None:
        """End a container, and the rollout that it is, when the calls under way have ended."""
        life = self.life(container)
        life.detach()
        rollout = await self._tasks.running(container.task, container.rollout)
        if rollout is not None:
            await self._tasks.finish_in_turn(rollout)
        self._drop(container)

    def _drop(self, container: Container) -> None:
        self._by_task[container.task].pop(container.id, None)
        container.state = "removed"
        life = self._lives.pop(container.id, Life())
        life.exited.set()
        life.removed.set()

    def names(self, task: str) -> Iterator[str]:
        """Yield the names of the rollouts that are containers of a task."""
        return (container.rollout for container in self._by_task[task].values())


def _read(task: str, rollout: str, note: dict[str, Any]) -> Container:
    made = note.pop("made")
    created = Created(**{**made, "main": tuple(made["main"])})
    container = Container(task=task, rollout=rollout, made=created, **note)
    if container.state == "running" and created.main and not created.background:
        # Its main command ran in a process that is gone: as after a crash of a Docker daemon.
        container.state, container.exit_code = "exited", KILLED
    return container
