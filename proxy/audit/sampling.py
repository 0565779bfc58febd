"""Which recorded calls an audit runs again, and along which paths of the tree (pure)."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from proxy.tree.tree import Node, Record, path
from sandboxes.spec import OUTSIDE_DRIVERS, EnvironmentSpec


@dataclass(frozen=True, slots=True)
class ReplayPath:
    """A path down a tree: where a sandbox is needed, and the records that are run again from there, in order."""

    start: Node
    steps: tuple[Record, ...]

    @property
    def nodes(self) -> list[Node]:
        """The nodes on the path, the start first."""
        return [self.start, *(step.target for step in self.steps)]

    def in_order(self, expected: Iterable[Record]) -> Iterator[Record]:
        """Yield what runs on the path: at each node the expected observations, then the step to the next node."""
        observations: dict[Node, list[Record]] = {}
        for record in expected:
            if record.observation:
                observations.setdefault(record.source, []).append(record)
        for node, step in zip_longest(self.nodes, self.steps):
            yield from observations.get(node, ())
            if step is not None:
                yield step


def reaches_outside(spec: EnvironmentSpec) -> bool:
    """Return whether a task's calls may reach servers or clients outside of its sandboxes."""
    return spec.egress is not None or spec.driver in OUTSIDE_DRIVERS


def sample_calls(top: Node, count: int | None, randomness: random.Random, before: float = math.inf) -> list[Record]:
    """Return a uniform sample of the calls below a node, or that led to it, recorded `before` a time; None for all.

    Private calls and everything below them are left out: their answers are given to no other rollout.
    """
    led = top.origin
    records = [] if led is None or not _is_sampled(led) or led.recorded_at >= before else [led]
    stack = [top]
    while stack:
        node = stack.pop()
        for record in node.records.values():
            if record.private or record.differs:
                continue
            if record.recorded_at < before and _is_sampled(record):
                records.append(record)
            if record.target.origin is record:
                stack.append(record.target)
    if count is None or count >= len(records):
        return records
    return randomness.sample(records, count)


def _is_sampled(record: Record) -> bool:
    return not (record.private or record.differs) and record.repeatable


def path_to(record: Record) -> ReplayPath | None:
    """Return a path from the root to the node where a record was made; None if no path leads there any more.

    After a call that is known not to reproduce its state, it begins at the nearest snapshot below instead.
    """
    steps: list[Record] = []
    for step in path(record.source):
        if not step.reproducible:
            break
        steps.append(step)
    else:
        return ReplayPath(steps[-1].source if steps else record.source, tuple(reversed(steps)))
    for count in range(len(steps) + 1):
        start = record.source if count == 0 else steps[count - 1].source
        if start.snapshot is not None:
            return ReplayPath(start, tuple(reversed(steps[:count])))
    return None


def cover(records: Iterable[Record]) -> tuple[list[tuple[ReplayPath, list[Record]]], list[Record]]:
    """Return paths, the longest first, that run all of the records, with those on each; and records without one.

    The deepest record takes the first path, and every other record on it (an observation, or a step) is checked along
    the way. So the paths share as few replayed calls as possible.
    """
    pending = dict.fromkeys(records)
    depths: dict[Node, int] = {}
    observations: dict[Node, list[Record]] = {}
    for record in pending:
        if record.observation:
            observations.setdefault(record.source, []).append(record)
    order = sorted(pending, key=lambda record: -_depth(record.source, depths) - (not record.observation))
    paths: list[tuple[ReplayPath, list[Record]]] = []
    unreachable: list[Record] = []
    for record in order:
        if record not in pending:
            continue
        replay = path_to(record)
        if replay is None:
            unreachable.append(record)
            del pending[record]
            continue
        # A call that changes the state is checked as the last step of its own path.
        whole = replay if record.observation else ReplayPath(replay.start, (*replay.steps, record))
        checked = [step for step in whole.steps if step in pending]
        checked += [seen for node in replay.nodes for seen in observations.get(node, ()) if seen in pending]
        for other in checked:
            del pending[other]
        paths.append((whole, checked))
    return paths, unreachable


def _depth(node: Node, known: dict[Node, int]) -> int:
    """Return how many calls lead to a node, and remember it for the node and its ancestors."""
    unknown: list[Node] = []
    ancestor: Node | None = node
    while ancestor is not None and ancestor not in known:
        unknown.append(ancestor)
        ancestor = None if ancestor.origin is None else ancestor.origin.source
    depth = -1 if ancestor is None else known[ancestor]
    for below in reversed(unknown):
        depth += 1
        known[below] = depth
    return known[node]
