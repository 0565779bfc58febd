"""Quotas: how many calls of a tenant's tasks run in sandboxes at once. A tenant is a pattern of task names.

Hits take no part in this. A call beyond the quota waits, in the order of arrival, and is refused with 429 when it has
waited too long or too many others wait. It leaves no record then.

Members of a cluster divide each quota by what they use: every member publishes how many calls run and wait (`Usage`),
and computes its share (`share_of`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from fnmatch import fnmatchcase
from typing import NamedTuple

from proxy.lifecycle import BackgroundWork
from proxy.refusals import RefusalError

EXCHANGE_S = 0.6
"""Interval at which members tell each other what they use: that of their leases. When calls move to another member, a
quota may be exceeded for so long."""

PAUSE_S = 0.2
"""Least time between two exchanges. A call that has to wait brings the next exchange forward."""


class Usage(NamedTuple):
    """How many calls one proxy runs, and how many wait, for a quota."""

    running: int
    waiting: int


def share_of(bound: int, own: Usage, others: Sequence[Usage]) -> int:
    """Return how many calls a member may run at once.

    If the calls of all members fit into the bound, it is the member's own calls and an equal part of the rest. If not,
    it is the part of the bound that its calls are of all calls; no more than others leave free, and at least 1, so that
    no member waits for ever. Members that know the same exceed the bound by one call for each at most.
    """
    calls, all_calls = sum(own), sum(own) + sum(map(sum, others))
    if all_calls <= bound:
        part = calls + (bound - all_calls) // (1 + sum(any(other) for other in others))
    else:
        part = bound * calls // all_calls
    return max(1, min(part, bound - sum(other.running for other in others)))


class Quota:
    """One quota at this proxy."""

    def __init__(self, bound: int) -> None:
        self.bound = self.share = bound  # For all members together, and at this one.
        self.running = 0  # How many run here.
        self.others: Sequence[Usage] = ()  # What other members use, as far as is known.
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def usage(self) -> Usage:
        """What this proxy uses."""
        return Usage(self.running, len(self._waiting))

    def divide(self, others: Sequence[Usage]) -> None:
        """Compute the share anew, from what the other members use."""
        self.others, self.share = others, share_of(self.bound, self.usage, others)
        self._admit()

    async def begin(self, patience_s: float) -> bool:
        """Wait until one more call may run, and count it; return False if that took too long. `end` must follow."""
        if self.running < self.share and not self._waiting:
            self.running += 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # It was admitted in the same moment.
                self.end()
            with suppress(ValueError):
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def end(self) -> None:
        """Note that a call which was counted is over."""
        self.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running < self.share:
            turn = self._waiting.popleft()
            # A call that has just given up is still in the line.
            if not turn.done():
                self.running += 1
                turn.set_result(None)


Exchange = Callable[[Mapping[str, Usage]], Awaitable[Mapping[str, Sequence[tuple[int, int]]] | None]]
"""Publishes what this member uses of each quota, and returns what the others use, as the values of a `Usage`; None if
that is not known now."""


class Quotas:
    """All quotas at this proxy."""

    def __init__(self, bounds: Mapping[str, int], *, patience_s: float, max_waiting: int) -> None:
        """Begin with this proxy's own quotas; a task belongs to the first pattern that fits.

        A call waits for `patience_s` before it is refused. Each quota has an equal part of `max_waiting`.
        """
        self.each = {pattern: Quota(bound) for pattern, bound in bounds.items()}  # The quotas, by pattern.
        self._patience_s, self._max_waiting = patience_s, max(1, max_waiting // len(bounds))
        self._exchange: Exchange | None = None
        # None if an exchange failed: the others may count what it told them, or what was told before.
        self._published: Mapping[str, Usage] | None = {}
        self._crowded = asyncio.Event()

    @asynccontextmanager
    async def running(self, task: str, waited_s: float = 0.0) -> AsyncIterator[None]:
        """Wait until a call of a task may run, less what it has waited; raise RefusalError (429) if it may not."""
        pattern = next((pattern for pattern in self.each if fnmatchcase(task, pattern)), None)
        if pattern is None:
            yield
            return
        quota = self.each[pattern]
        if quota.running >= quota.share:
            self._crowded.set()
        if quota.usage.waiting >= self._max_waiting or not await quota.begin(max(0.0, self._patience_s - waited_s)):
            raise RefusalError(
                429, "quota",
                f"the tasks named {pattern} have a quota of {quota.bound} calls at once, which are running. Run fewer "
                "rollouts at once, or try again later.",
            )  # fmt: skip
        try:
            yield
        finally:
            quota.end()

    def divide(self, exchange: Exchange) -> BackgroundWork:
        """Divide the quotas with other members from now on; return the work that does it, for ever."""
        self._exchange = exchange
        for quota in self.each.values():
            # The first call runs at once. The next one waits for the first exchange.
            quota.share = 1
        return BackgroundWork("quotas", PAUSE_S, self._divide)

    async def refresh(self) -> None:
        """Publish what this member uses, and compute the shares anew."""
        if self._exchange is None:
            return
        used = {pattern: quota.usage for pattern, quota in self.each.items()}
        others = await self._exchange(used)
        self._published = None if others is None else used
        if others is None:
            return
        for pattern, quota in self.each.items():
            quota.divide([Usage(*calls) for calls in others.get(pattern, ())])
            if not any(used[pattern]):
                # A member without calls reads nothing more, and others may use what is free now.
                quota.share = 1

    async def _divide(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(EXCHANGE_S):
                await self._crowded.wait()
        self._crowded.clear()
        # What was published last must not stay: the others count it.
        is_published = self._published is None or any(map(any, self._published.values()))
        if is_published or any(any(quota.usage) for quota in self.each.values()):
            await self.refresh()
