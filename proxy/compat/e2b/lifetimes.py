"""The time that each of E2B's sandboxes is given: how long it is, and what becomes of one whose time is over."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from proxy.tree.rollout import Rollout
from sandboxes.errors import SandboxError

log = structlog.get_logger()

MAX_S = 86_400.0
"""Timers are not set further ahead: when one is due it looks again."""

SandboxNote = dict[str, Any]
Over = Callable[[Rollout], Awaitable[None]]


def is_over(note: SandboxNote, now: float) -> bool:
    """Whether the time of a sandbox that runs is over; one that was not made as a sandbox of E2B's has no end (pure).

    now: seconds since 1970.
    """
    return bool(note.get("mortal")) and not note["paused"] and now >= float(note["ends"])


class Lifetimes:
    """One timer for each sandbox that has an end. over: awaited when its time is; it looks whether that is still so."""

    def __init__(self, over: Over, clock: Callable[[], float] = time.time) -> None:
        self._over, self._clock = over, clock
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._endings: set[asyncio.Task[None]] = set()

    def watch(self, rollout: Rollout, note: SandboxNote) -> None:
        """Have an end come when note says so, and not when it said so before."""
        self.forget(rollout)
        if note.get("mortal") and not note["paused"]:
            left_s = min(MAX_S, max(0.0, float(note["ends"]) - self._clock()))
            timer = asyncio.get_running_loop().call_later(left_s, self._due, rollout)
            self._timers[rollout.id] = timer

    def forget(self, rollout: Rollout) -> None:
        """Watch no more over one that has ended, or has no end any more."""
        timer = self._timers.pop(rollout.id, None)
        if timer is not None:
            timer.cancel()

    async def aclose(self) -> None:
        """Let nothing end any more: the next start knows what is over."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._endings:
            await asyncio.wait(self._endings)

    def _due(self, rollout: Rollout) -> None:
        self._timers.pop(rollout.id, None)
        ending = asyncio.ensure_future(self._end(rollout))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end(self, rollout: Rollout) -> None:
        try:
            await self._over(rollout)
        except (SandboxError, OSError) as error:
            log.warning("a sandbox whose time is over could not be ended", rollout=rollout.name, error=str(error))
