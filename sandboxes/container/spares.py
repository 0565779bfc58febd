"""Spare containers, which wait at an image's root state, and what takes one.

Docker takes 0.15 s to start a container, a keeper 0.05 s. So `Spares` keeps some started for each combination of image
and limits that was used last: as many as sandboxes begin at once. Taking one starts another in the background.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandboxes.container.boxes import Box, Boxes
from sandboxes.container.daemon import Daemon
from sandboxes.container.patterns import Patterns, SpareKind
from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.spare_demand import SpareDemand
from sandboxes.spec import Limits
from sandboxes.task_owner import TaskOwner

MAX_KINDS = 4
"""Limits the combinations of image and limits that have spares; the ones used last keep theirs.

The value is an estimate.
"""

_MOST = 8
"""The most spares of a kind after a burst, as a multiple of `container_spares`: 16 by default, each with about 15 MB of
Docker's and our processes. A group of rollouts of one task begins at once, and groups of 8 to 16 are usual."""

_BURST_S = 2.0
"""Containers that are taken within so many seconds count as taken at once: Docker starts about 14 in that time."""


class Spares:
    """Keeps the spare containers of one driver.

    Attributes:
        boxes: Makes and removes containers.
        background: Tasks that remove and make containers; `close` waits for them.
    """

    def __init__(self, daemon: Daemon, data_dir: Path, *, spares: int, docker_starts: bool = False) -> None:
        """Name the directories; `open` starts the keeper launcher.

        Args:
            daemon: The connection to the Docker daemon.
            data_dir: The driver's own directory.
            spares: How many spare containers wait at least for each combination of image and limits; with 0, none.
            docker_starts: Whether Docker starts all of them.
        """
        self.boxes = Boxes(daemon, data_dir)
        # Tools that an MCP server declares as read-only, for each server: its declaration holds for every sandbox.
        self.read_only: dict[str, frozenset[str]] = {}
        self.background = TaskOwner()
        self._patterns = Patterns(self.boxes, self.background, docker_starts=docker_starts)
        self._spares_per_kind = spares
        self._spares: OrderedDict[SpareKind, list[Box]] = OrderedDict()
        self._demands: dict[SpareKind, SpareDemand] = {}
        # Sandboxes that wait for a container of their own go before spares.
        self._awaited = 0
        self._restocking: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self, instance: str, info: Mapping[str, Any]) -> None:
        """Start the keeper launcher.

        Args:
            instance: The id of this data directory's instance, which labels its containers.
            info: The daemon's description of itself.

        Raises:
            SandboxError: The launcher does not start: the proxy is not root, or the kernel refuses mounts.
        """
        self._closing = False
        self._patterns.open(info)
        await self.boxes.open(instance)

    async def close(self) -> None:
        """Remove the spares, wait for all background tasks, and end the keeper launcher. Idempotent."""
        # From here on `_fill` and `restock` make no container, so the list below is complete.
        self._closing = True
        spares = [box for boxes in self._spares.values() for box in boxes]
        self._spares.clear()
        await asyncio.gather(*(self.boxes.throw_away(box) for box in spares))
        await self.background.wait()
        await self._patterns.close()
        await self.boxes.close()

    # -- containers --------------------------------------------------------------------------------------------------

    async def take(self, image: str, limits: Limits) -> Box:
        """Return a container at its image's root state: a spare one, or a new one.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        kind = (image, limits)
        waiting = self._spares.setdefault(kind, [])
        self._spares.move_to_end(kind)
        self._demand(kind).note(time.monotonic())
        while waiting:
            box = waiting.pop(0)
            # A spare's keeper may have died since, and its container with it.
            if box.channel.lost is None:
                return box
            self._discard(box)
        self._awaited += 1
        try:
            return await self.make(image, limits)
        finally:
            self._awaited -= 1

    def _demand(self, kind: SpareKind) -> SpareDemand:
        least = self._spares_per_kind
        return self._demands.setdefault(kind, SpareDemand(least=least, most=_MOST * least, burst_s=_BURST_S))

    def restock(self) -> None:
        """Make spares in the background until each kind has its number, and remove what is above it."""
        if not self._closing and (self._restocking is None or self._restocking.done()):
            self._restocking = self.background.spawn("make spare containers", self._fill())

    async def _fill(self) -> None:
        while len(self._spares) > MAX_KINDS:
            kind, waiting = self._spares.popitem(last=False)
            self._demands.pop(kind, None)
            for box in waiting:
                self._discard(box)
        self._patterns.trim(self._spares)
        # A failure of Docker's is not reported here: the next sandbox that needs a container meets it and reports it.
        with contextlib.suppress(SandboxError, SpecError):
            # The kind that was used last comes first.
            for kind, waiting in reversed(list(self._spares.items())):
                demand = self._demand(kind)
                while len(waiting) > demand.wanted(time.monotonic()):
                    self._discard(waiting.pop())
                while len(waiting) < demand.wanted(time.monotonic()) and not (self._closing or self._awaited):
                    box = await self.make(*kind)
                    # Meanwhile the driver may have closed, or the kind may have been dropped.
                    if self._closing or self._spares.get(kind) is not waiting:
                        await self.boxes.throw_away(box)
                        break
                    waiting.append(box)

    async def make(self, image: str, limits: Limits) -> Box:
        """Start a container, with a pattern if there can be one.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        return await self._patterns.start((image, limits))

    def _discard(self, box: Box) -> None:
        self.background.spawn(f"remove container {box.id}", self.boxes.throw_away(box))
