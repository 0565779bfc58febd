"""Calls that may change places: those of one rollout that wait at the same time have one order in every rollout.

An agent that uploads its files all at once sends them in an order that differs from run to run. In the order of arrival
the second rollout would leave the tree at the first of them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from proxy.tree.keys import CallKey
from proxy.tree.rollout import Rollout

WINDOW_S = 0.05
"""How long one that is not known where its rollout stands waits for others that may be."""


@dataclass(slots=True, eq=False)
class _Group:
    """Those of one rollout that wait or run; `changed` is set, and replaced, whenever one has ended."""

    keys: list[CallKey] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Gathering:
    """Which of the calls that commute are waiting, by rollout."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def busy(self, rollout: Rollout) -> bool:
        """Whether calls that commute are waiting."""
        return rollout.id in self._groups

    @asynccontextmanager
    async def turn(self, rollout: Rollout, key: CallKey, *, commutes: bool) -> AsyncIterator[None]:
        """Wait for the turn of a call. Of those that commute the known ones come first, then the least key.

        Any other waits until all of them are answered.
        """
        if not commutes:
            while (group := self._groups.get(rollout.id)) is not None:
                await group.changed.wait()
            yield
            return
        group = self._groups.setdefault(rollout.id, _Group())
        group.keys.append(key)
        try:
            await self._await_turn(group, rollout, key)
            yield
        finally:
            group.keys.remove(key)
            group.changed.set()
            group.changed = asyncio.Event()
            if not group.keys:
                del self._groups[rollout.id]

    async def _await_turn(self, group: _Group, rollout: Rollout, key: CallKey) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + WINDOW_S
        while key not in rollout.node.records:
            known = any(other in rollout.node.records for other in group.keys)
            if loop.time() >= until and not known and key == min(group.keys):
                return
            left = until - loop.time()
            try:
                async with asyncio.timeout(left if left > 0 else None):
                    await group.changed.wait()
            except TimeoutError:
                continue
