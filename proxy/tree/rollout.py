"""Tasks and their rollouts, each rollout standing at one node of its task's tree (pure but for its clock)."""

import asyncio
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

from proxy.tree.keys import CallKey, again_key, private_key
from proxy.tree.tree import Node, Record, Tree
from sandboxes.driver import YOUNG_S
from sandboxes.spec import EnvironmentSpec

MUCH_SOONER_S = 3.0
"""Agents take longer or shorter to think; with less between two of them the one may be told what the other was."""


class Outcome(IntEnum):
    """How one call of a rollout was answered. The numbers are written to disk: never change one."""

    HIT = 0
    MISS = 1
    WAIT = 2
    BYPASS = 3


@dataclass(slots=True, eq=False)
class Rollout:
    """One agent's run of a task: where it stands, and how many calls brought it there.

    heard: of a state that goes on by itself, the keys of what was answered here without leading on: see `key_of`.
    since: when it came to its node, by its own clock (seconds of a monotonic one), on which what the tree answers takes
    the time that the call took. 0.0: long ago.
    asked_at: when it asked what is not answered yet, by that clock too: what it waits for us is no time of its own.
    turn: held while a call of this rollout is answered, so that its calls are answered in order of arrival.
    waiting: calls that have arrived and are not answered yet. used_at: seconds of a monotonic clock.
    """

    id: int
    name: str
    task: str
    tree: Tree
    node: Node
    cached: bool = True
    calls: int = 0
    finished: bool = False
    waiting: int = 0
    used_at: float = 0.0
    since: float = 0.0
    asked_at: float = 0.0
    heard: set[CallKey] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def key_of(self, key: CallKey) -> CallKey:
        """Return the key under which this rollout looks a call up: its own, unheard of, where nothing may be reused.

        Beside live processes, whoever asks the same again waits for something: told what it was told before, it would
        wait for ever. So what was heard here has other keys the next time, which all who ask as often share. So has
        what was heard while they were just starting, by somebody who came back to them much sooner.
        """
        if not self.cached:
            return private_key(key, self.id, self.calls)
        nth, asked = 0, key
        while asked in self.heard or self._is_older_than(asked):
            nth += 1
            asked = again_key(key, nth)
        return asked

    @property
    def age_s(self) -> float:
        """Seconds for which it had stood at its node when it asked, by its own clock."""
        return (self.asked_at or time.monotonic()) - self.since

    def _is_older_than(self, key: CallKey) -> bool:
        """Whether what a record tells of processes that were just starting may be another by now."""
        record = self.node.records.get(key) if self.node.young else None
        return record is not None and record.age_s < YOUNG_S and self.age_s > record.age_s + MUCH_SOONER_S

    def advance(self, record: Record, outcome: Outcome) -> None:
        """Take the step that record describes. O(1)."""
        self.calls += 1
        if outcome is Outcome.HIT or outcome is Outcome.WAIT:
            record.hits += 1
        if record.target is not self.node:
            self.node = record.target
            self.heard.clear()
            record.target.passes += 1
        elif self.node.state is None:
            self.heard.add(record.key)


class Walkers:
    """Which rollouts run in which tree."""

    def __init__(self) -> None:
        self._by_tree: dict[int, set[Rollout]] = {}

    def enter(self, rollout: Rollout) -> None:
        self._by_tree.setdefault(rollout.tree.id, set()).add(rollout)

    def leave(self, rollout: Rollout) -> None:
        others = self._by_tree.get(rollout.tree.id, set())
        others.discard(rollout)
        if not others:
            self._by_tree.pop(rollout.tree.id, None)

    def of(self, tree_id: int) -> Collection[Rollout]:
        return self._by_tree.get(tree_id, ())


@dataclass(slots=True, eq=False)
class Task:
    """A task as it stands now: its spec, the tree of that spec, and the rollouts that run by name.

    origin: the spec as its user wrote it; None for a task that runs on the default.
    """

    name: str
    spec: EnvironmentSpec
    tree: Tree
    origin: str | None
    created_at: float
    used_at: float = 0.0
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    @property
    def last_used_at(self) -> float:
        """When it was opened or one of its rollouts made a call; infinite while a call is under way."""
        if any(rollout.waiting for rollout in self.rollouts.values()):
            return math.inf
        return max([self.used_at, *(rollout.used_at for rollout in self.rollouts.values())])
