"""What happens, second by second: the last hour of it in memory, and a stream of it for who listens.

Nothing here is on the way of a call: totals are looked at once a second, and a listener that does not keep up loses
events and is told how many.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from proxy.telemetry.counters import Counters
from proxy.tree.rollout import Rollout

HOUR = 3600
_QUEUED = 64
_MOVES_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Second:
    """What happened in a second that ended `at`; counts and seconds of tools."""

    at: float
    hits: int = 0
    misses: int = 0
    waits: int = 0
    bypasses: int = 0
    replays: int = 0
    executed_s: float = 0.0
    saved_s: float = 0.0
    errors: int = 0
    refusals: int = 0
    sandboxes: int = 0


def between(before: dict[str, float], now: dict[str, float], *, at: float, sandboxes: int) -> Second:
    """Return what happened between two looks at the totals (pure)."""
    return Second(at, **{name: now[name] - before[name] for name in now}, sandboxes=sandboxes)  # type: ignore[arg-type]


def totals(counts: Counters) -> dict[str, float]:
    """Return the totals whose differences a `Second` tells."""
    hits, misses, waits, bypasses = counts.outcomes
    return {
        "hits": hits, "misses": misses, "waits": waits, "bypasses": bypasses, "replays": counts.replayed_calls,
        "executed_s": counts.executed_s, "saved_s": counts.saved_s, "errors": sum(counts.failures.values()),
        "refusals": sum(counts.refusals.values()),
    }  # fmt: skip


@dataclass(slots=True, eq=False)
class Subscriber:
    """Who listens. whole: is told what happens in all tasks together. task: whose rollouts' movements it is told too.

    lost: events that it did not take in time.
    """

    task: str | None = None
    whole: bool = True
    queue: deque[dict[str, Any]] = field(default_factory=deque)
    lost: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def put(self, event: dict[str, Any]) -> None:
        if len(self.queue) >= _QUEUED:
            self.queue.popleft()
            self.lost += 1
        self.queue.append(event)
        self.woken.set()

    async def next(self, within_s: float) -> dict[str, Any] | None:
        """Return the next event; None where there is none within the time."""
        while not self.queue:
            self.woken.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self.woken.wait()
            except TimeoutError:
                return None
        if self.lost:
            lost, self.lost = self.lost, 0
            return {"event": "lost", "count": lost}
        return self.queue.popleft()


class Activity:
    """Looks once a second. rollouts: returns those that run in a task; sandboxes: how many live."""

    def __init__(
        self,
        counts: Counters,
        sandboxes: Callable[[], int],
        rollouts: Callable[[str], list[Rollout]],
        *,
        most: int = 64,
    ) -> None:
        self._counts, self._sandboxes, self._rollouts, self._most = counts, sandboxes, rollouts, most
        self._last = totals(counts)
        self._closed = False
        self.seconds: deque[Second] = deque(maxlen=HOUR)
        self.listeners: set[Subscriber] = set()

    @property
    def full(self) -> bool:
        """Whether as many listen as may."""
        return len(self.listeners) >= self._most

    @property
    def closed(self) -> bool:
        return self._closed

    async def beat(self) -> None:
        """Note what happened since the last beat, and tell who listens."""
        now = totals(self._counts)
        second = between(self._last, now, at=time.time(), sandboxes=self._sandboxes())
        self._last = now
        self.seconds.append(second)
        told = {"event": "second", **asdict(second)}
        for listener in self.listeners:
            if listener.whole:
                listener.put(told)
            moves = [] if listener.task is None else self._moves(listener)
            if moves:
                listener.put({"event": "rollouts", "task": listener.task, "at": second.at, "moves": moves})

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for listener in self.listeners:
            listener.put({"event": "end"})

    @contextmanager
    def listening(self, task: str | None, *, whole: bool = True) -> Iterator[Subscriber]:
        """Give a listener its queue for the time of the block."""
        listener = Subscriber(task, whole)
        self.listeners.add(listener)
        try:
            yield listener
        finally:
            self.listeners.discard(listener)

    def _moves(self, listener: Subscriber) -> list[dict[str, Any]]:
        """Return which rollouts took steps, and which ended, since the listener was last told."""
        assert listener.task is not None
        running = {rollout.name: rollout for rollout in self._rollouts(listener.task)}
        moves: list[dict[str, Any]] = []
        for name, rollout in running.items():
            place = (rollout.node.id, rollout.calls)
            if listener.places.get(name) != place:
                if len(moves) == _MOVES_SHOWN:
                    break
                listener.places[name] = place
                moves.append({"rollout": name, "node": f"n{place[0]}", "calls": place[1], "finished": False})
        for name in [name for name in listener.places if name not in running]:
            node, calls = listener.places.pop(name)
            moves.append({"rollout": name, "node": f"n{node}", "calls": calls, "finished": True})
        return moves


def timeline(seconds: list[Second], *, span_s: int, step_s: int) -> list[Second]:
    """Return the last span_s seconds in steps of step_s, oldest first; counts add up, sandboxes are the most (pure)."""
    found: list[Second] = []
    chosen = seconds[-span_s:]
    for start in range(0, len(chosen), step_s):
        part = chosen[start : start + step_s]
        summed = {
            name: sum(getattr(second, name) for second in part)
            for name in Second.__slots__
            if name not in ("at", "sandboxes")
        }
        found.append(Second(part[-1].at, **summed, sandboxes=max(second.sandboxes for second in part)))
    return found
