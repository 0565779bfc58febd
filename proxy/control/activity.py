"""The activity of the last hour, second by second, and streams of events to clients.

No call waits for this module: it compares the totals once a second. A slow client loses its oldest events.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from proxy.telemetry.counters import Counters
from proxy.times import UtcTime, utc_text
from proxy.tree.rollout import Rollout

HOUR = 3600
"""Length of the timeline in seconds."""
_MAX_LISTENERS = 64
"""Maximum number of event streams."""
_QUEUED = 64
"""Events that may wait for one client: about a minute."""
_MOVES_SHOWN = 200
"""Rollout movements in one event; the next event continues with the others."""


@dataclass(frozen=True, slots=True)
class Second:
    """What happened in one second, or in a step of a timeline, which has the maximum of its `sandboxes`."""

    at: UtcTime
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
    """Return what happened between two readings of the totals (pure)."""
    return Second(at, **{name: now[name] - before[name] for name in now}, sandboxes=sandboxes)  # type: ignore[arg-type]


def totals(counts: Counters) -> dict[str, float]:
    """Return the totals whose differences make a `Second`."""
    return {
        **counts.by_name, "replays": counts.replayed_calls, "executed_s": counts.executed_s, "saved_s": counts.saved_s,
        "errors": sum(counts.failures.values()), "refusals": sum(counts.refusals.values()),
    }  # fmt: skip


@dataclass(slots=True, eq=False)
class Subscriber:
    """A client of the event stream."""

    task: str | None = None  # The one whose rollouts' movements are sent; None for no movements.
    whole: bool = True  # Whether the totals of all tasks together are sent.
    queue: deque[dict[str, Any]] = field(default_factory=deque)  # Events that the client has not received yet.
    lost: int = 0  # Events dropped since the last `lost` event, because the queue was full.
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # Set when an event arrives.
    # Node and number of calls of each rollout, as the client knows them.
    positions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def put(self, event: dict[str, Any]) -> None:
        """Queue an event; a full queue drops its oldest event."""
        if len(self.queue) >= _QUEUED:
            self.queue.popleft()
            self.lost += 1
        self.queue.append(event)
        self.woken.set()

    async def next(self, within_s: float) -> dict[str, Any] | None:
        """Return the next event; None if there is none within the time."""
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
    """The timeline of the last hour, and its event streams."""

    def __init__(
        self,
        counts: Counters,
        sandboxes: Callable[[], int],
        rollouts: Callable[[str], list[Rollout]],
        *,
        keep: Callable[[Second], None] = lambda _: None,
    ) -> None:
        """Start the timeline. `sandboxes` and `rollouts` count what runs now; `keep` takes each second for longer."""
        self._counts, self._sandboxes, self._rollouts, self._keep = counts, sandboxes, rollouts, keep
        self.max_listeners = _MAX_LISTENERS
        self._last = totals(counts)
        self._closed = False
        self.seconds: deque[Second] = deque(maxlen=HOUR)  # The last hour, oldest second first.
        self.listeners: set[Subscriber] = set()  # The clients of the event streams.

    @property
    def full(self) -> bool:
        """Whether the limit of event streams is reached."""
        return len(self.listeners) >= self.max_listeners

    @property
    def closed(self) -> bool:
        """Whether the proxy is shutting down, so that every stream ends."""
        return self._closed

    async def tick(self) -> None:
        """Record the second that ends now, and send it to the listeners."""
        now = totals(self._counts)
        second = between(self._last, now, at=time.time(), sandboxes=self._sandboxes())
        self._last = now
        self.seconds.append(second)
        self._keep(second)
        event = {"event": "second", **asdict(second), "at": utc_text(second.at)}
        for listener in self.listeners:
            if listener.whole:
                listener.put(event)
            moves = [] if listener.task is None else self._moves(listener)
            if moves:
                listener.put({"event": "rollouts", "task": listener.task, "at": event["at"], "moves": moves})

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for listener in self.listeners:
            listener.put({"event": "end"})

    @contextmanager
    def listening(self, task: str | None, *, whole: bool = True) -> Iterator[Subscriber]:
        """Subscribe a client for the duration of the block."""
        listener = Subscriber(task, whole)
        self.listeners.add(listener)
        try:
            yield listener
        finally:
            self.listeners.discard(listener)

    def _moves(self, listener: Subscriber) -> list[dict[str, Any]]:
        """Return the rollouts that moved or ended since the last event for this client."""
        assert listener.task is not None
        running = {rollout.name: rollout for rollout in self._rollouts(listener.task)}
        moves: list[dict[str, Any]] = []
        for name, rollout in running.items():
            position = (rollout.node.id, rollout.calls)
            if listener.positions.get(name) != position:
                if len(moves) == _MOVES_SHOWN:
                    break
                listener.positions[name] = position
                moves.append({"rollout": name, "node": f"n{position[0]}", "calls": position[1], "finished": False})
        for name in [name for name in listener.positions if name not in running]:
            node, calls = listener.positions.pop(name)
            moves.append({"rollout": name, "node": f"n{node}", "calls": calls, "finished": True})
        return moves


def timeline(seconds: list[Second], *, span_s: int, step_s: int) -> list[Second]:
    """Return the last `span_s` seconds in steps of `step_s`, oldest first (pure)."""
    steps: list[Second] = []
    chosen = seconds[-span_s:]
    for start in range(0, len(chosen), step_s):
        part = chosen[start : start + step_s]
        summed = {
            name: sum(getattr(second, name) for second in part)
            for name in Second.__slots__
            if name not in ("at", "sandboxes")
        }
        steps.append(Second(part[-1].at, **summed, sandboxes=max(second.sandboxes for second in part)))
    return steps
