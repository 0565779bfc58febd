"""Timers for the timeouts of E2B's sandboxes."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from proxy.compat.e2b.sandbox_note import SandboxNote
from proxy.tree.rollout import Rollout
from sandboxes.errors import SandboxError
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

MAX_TIMER_S = 86_400.0
"""Longest timer. A later timeout is checked again after this time; event loops refuse timers of many years."""


class Lifetimes:
    """One timer for each sandbox whose timeout applies."""

    def __init__(self, over: Callable[[Rollout], Awaitable[None]]) -> None:
        """Create the timers. `over` checks the note again, because the timeout may have been extended."""
        self._over = over
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._endings = TaskOwner()

    def watch(self, rollout: Rollout, note: SandboxNote) -> None:
        """Replace the timer of a sandbox according to its note."""
        self.forget(rollout)
        if note.mortal and not note.paused:
            remaining_s = min(MAX_TIMER_S, max(0.0, note.ends_at - time.time()))
            self._timers[rollout.id] = asyncio.get_running_loop().call_later(remaining_s, self._due, rollout)

    def forget(self, rollout: Rollout) -> None:
        """Cancel the timer of a sandbox."""
        timer = self._timers.pop(rollout.id, None)
        if timer is not None:
            timer.cancel()

    async def aclose(self) -> None:
        """Cancel all timers. Deadlines are stored; expired sandboxes are ended at the next start."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._endings.wait()

    def _due(self, rollout: Rollout) -> None:
        self._timers.pop(rollout.id, None)
        self._endings.spawn("end E2B sandbox", self._end(rollout))

    async def _end(self, rollout: Rollout) -> None:
        try:
            await self._over(rollout)
        except (SandboxError, OSError) as error:
            log.warning("expired sandbox could not be ended", rollout=rollout.name, error=str(error))
