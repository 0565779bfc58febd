"""Which containers serve as patterns, and the start of others with them.

Docker starts one container for each image and limits in use, and its keeper stays with it as with any other. The
containers of sandboxes are started as it was (`oci_spec`), on its layers. So a pattern stays while they do. If it ends,
Docker removes one of these layers, and their keepers end them at once.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from sandboxes.container.boxes import Box, Boxes
from sandboxes.container.oci_spec import Pattern, Runtime, UnfitError, read_pattern, runtime_of
from sandboxes.errors import SandboxError, SpecError
from sandboxes.spec import Limits
from sandboxes.task_owner import TaskOwner

MAX_FAILURES = 3
"""After so many failures in a row to start a container without Docker, Docker starts all of the same image and limits.

The value is an estimate.
"""

SpareKind = tuple[str, Limits]
"""An image and the limits that its container was started with."""

_log = logging.getLogger(__name__)


class Patterns:
    """The patterns of one driver."""

    def __init__(self, boxes: Boxes, background: TaskOwner, *, docker_starts: bool) -> None:
        """Begin without any; see `open`.

        Args:
            boxes: Makes and removes containers.
            background: Holds the tasks that make and remove patterns.
            docker_starts: Whether Docker starts all containers, and there are no patterns.
        """
        self._boxes, self._background, self._docker_starts = boxes, background, docker_starts
        # None: Docker starts all containers.
        self._runtime: Runtime | None = None
        self._tasks: dict[SpareKind, asyncio.Task[tuple[Box, Pattern]]] = {}
        # How many containers of a kind are being started or in use, and how many starts failed one after the other.
        self._users: Counter[SpareKind] = Counter()
        self._failures: Counter[SpareKind] = Counter()

    def open(self, info: Mapping[str, Any]) -> None:
        """Take the runtime that the daemon uses, if its containers can be started without it.

        Args:
            info: The daemon's description of itself.
        """
        self._runtime = None
        self._failures.clear()
        if not self._docker_starts:
            try:
                self._runtime = runtime_of(info, self._boxes.folder.parent)
            except UnfitError as error:
                _log.info("Docker starts all containers: %s", error)

    def are_used(self, kind: SpareKind) -> bool:
        """Return whether containers of an image and limits are started without Docker."""
        return self._runtime is not None and self._failures[kind] < MAX_FAILURES

    async def start(self, kind: SpareKind) -> Box:
        """Start a container: in 0.05 s with a pattern, otherwise in 0.15 s.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        # Before the first await: a pattern that is in use is not removed.
        self._users[kind] += 1
        box: Box | None = None
        try:
            if (pattern := await self._pattern(kind)) is not None:
                box = await self._start(pattern, kind)
        finally:
            if box is None:
                self._users[kind] -= 1
        return box or await self._boxes.start_by_docker(*kind)

    async def _start(self, pattern: Pattern, kind: SpareKind) -> Box | None:
        """Start a container with a pattern; return None if that fails."""
        try:
            box = await self._boxes.start_by_pattern(pattern, kind[1])
        except SandboxError as error:
            self._failures[kind] += 1
            which = "this container" if self.are_used(kind) else "all containers from now on"
            _log.warning("image %s: Docker starts %s, because a start without it failed: %s", kind[0], which, error)
            return None
        del self._failures[kind]
        box.on_end = lambda: self._users.subtract((kind,))
        return box

    async def _pattern(self, kind: SpareKind) -> Pattern | None:
        """Return the pattern of an image and limits; None if Docker starts its containers.

        Docker starts the pattern if there is none, or if it has ended.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        if (runtime := self._runtime) is None or not self.are_used(kind):
            return None
        task = self._tasks.get(kind)
        if task is not None and (box := _box(task)) is not None and box.channel.lost is not None:
            # The containers on its layers are ending: their keepers watch it.
            self._background.spawn(f"remove container {box.id}", self._boxes.throw_away(box))
            task = None
        if task is None or (task.done() and _box(task) is None):
            # A task of its own: others wait for the same pattern, and the caller may be cancelled.
            task = self._background.spawn("start a pattern", self._make(kind, runtime), awaited=True)
            self._tasks[kind] = task
        try:
            return (await asyncio.shield(task))[1]
        except UnfitError as error:
            if self.are_used(kind):
                _log.warning("image %s: Docker starts all containers: %s", kind[0], error)
            self._failures[kind] = MAX_FAILURES
            return None

    async def _make(self, kind: SpareKind, runtime: Runtime) -> tuple[Box, Pattern]:
        box = await self._boxes.start_by_docker(*kind)
        try:
            assert box.started is not None, "Docker has started it"
            return box, await asyncio.to_thread(read_pattern, box.started, runtime)
        except BaseException:
            await self._boxes.throw_away(box)
            raise

    def trim(self, kept: Collection[SpareKind]) -> None:
        """Remove the patterns of other kinds that no container is on, in the background."""
        for kind in [kind for kind, task in self._tasks.items() if task.done() and kind not in kept]:
            if not self._users[kind]:
                del self._users[kind]
                # Taken out now: what starts from here on gets another one.
                self._background.spawn("remove a pattern", self._remove(self._tasks.pop(kind)))

    async def close(self) -> None:
        """Remove all patterns. The sandboxes are closed by now, so nothing is on their layers."""
        tasks, self._tasks = self._tasks, {}
        await asyncio.gather(*map(self._remove, tasks.values()))

    async def _remove(self, task: asyncio.Task[tuple[Box, Pattern]]) -> None:
        with contextlib.suppress(SandboxError, SpecError, UnfitError):
            await self._boxes.throw_away((await task)[0])


def _box(task: asyncio.Task[tuple[Box, Pattern]]) -> Box | None:
    """Return the pattern's container; None if it does not run yet, or could not be started."""
    return task.result()[0] if task.done() and not task.cancelled() and task.exception() is None else None
