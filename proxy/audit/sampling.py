"""Which recorded calls to look at again, and along which ways (pure)."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.tree.tree import Node, Record, path


@dataclass(frozen=True, slots=True)
class Walk:
    """A way down a tree: from start, along steps."""

    start: Node
    steps: tuple[Record, ...]


def chosen(below: Node, count: int | None, randomness: random.Random) -> list[Record]:
    """Return count of the calls that led to below, were recorded there and under it, drawn evenly; all without a count.

    Private ones are answered to nobody else, and are left out with what came from them.
    """
    led = below.origin
    records = [] if led is None or led.private or led.differs else [led]
    stack = [below]
    while stack:
        node = stack.pop()
        for record in node.records.values():
            if record.private or record.differs:
                continue
            records.append(record)
            if record.target.origin is record:
                stack.append(record.target)
    if count is None or count >= len(records):
        return records
    return randomness.sample(records, count)


def way_to(record: Record) -> Walk | None:
    """Return the way to the node at which record was made; None where none is known to lead there.

    It begins at the root, or, behind a call that is known not to lead again where it led, at a kept state.
    """
    steps: list[Record] = []
    for step in path(record.source):
        if not step.reproducible:
            break
        steps.append(step)
    else:
        return Walk(steps[-1].source if steps else record.source, tuple(reversed(steps)))
    for count in range(len(steps) + 1):
        start = record.source if count == 0 else steps[count - 1].source
        if start.snapshot is not None:
            return Walk(start, tuple(reversed(steps[:count])))
    return None


def walks(records: Iterable[Record]) -> tuple[list[tuple[Walk, list[Record]]], list[Record]]:
    """Return ways on which all of records are met, the longest first, each with those that are met on it; and the
    records to which no way is known. O(records + nodes above them + steps of the ways).

    A record that changes the state is met as the last step of its way, or as one of another's.
    """
    left = dict.fromkeys(records)
    depths: dict[Node, int] = {}
    looks: dict[Node, list[Record]] = {}
    for record in left:
        if record.observation:
            looks.setdefault(record.source, []).append(record)
    order = sorted(left, key=lambda record: -_depth(record.source, depths) - (not record.observation))
    found: list[tuple[Walk, list[Record]]] = []
    lost: list[Record] = []
    for record in order:
        if record not in left:
            continue
        way = way_to(record)
        if way is None:
            lost.append(record)
            del left[record]
            continue
        nodes = [way.start, *(step.target for step in way.steps)]
        whole = way if record.observation else Walk(way.start, (*way.steps, record))
        met = [step for step in whole.steps if step in left]
        met += [look for node in nodes for look in looks.get(node, ()) if look in left]
        for one in met:
            del left[one]
        found.append((whole, met))
    return found, lost


def _depth(node: Node, known: dict[Node, int]) -> int:
    """Return how many calls lead to node."""
    above: list[Node] = []
    at: Node | None = node
    while at is not None and at not in known:
        above.append(at)
        at = None if at.origin is None else at.origin.source
    depth = -1 if at is None else known[at]
    for below in reversed(above):
        depth += 1
        known[below] = depth
    return known[node]
