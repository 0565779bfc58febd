"""Groups of rollouts, compared by the states that they reached: where they part and meet, and what winners did (pure).

Rollouts are aligned by nodes and not by the number of a call: a call that changed nothing stays at its node.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T", int, tuple[int, int, int])


class MadeCall(NamedTuple):
    """A call of a rollout: the numbers of its text, and of the nodes that it was made at and led to."""

    call: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RolloutWay:
    """A rollout on its way through the tree."""

    name: str
    start: int  # The node that it began at.
    end: int  # The node that it is at.
    reward: float | None
    moves: Sequence[MadeCall]


class Shared(NamedTuple):
    """A call, a state or both, and the names of the rollouts that have it."""

    call: int | None
    node: int | None
    names: list[str]


class GroupComparison(NamedTuple):
    """What a group of rollouts has in common, and what not; what most of them have is first."""

    parts: list[tuple[int, list[Shared]]]  # Nodes from which they went to several states, and how each left.
    same_end: list[Shared]  # Nodes that several of them are at.
    # Of the nodes that rollouts with a high reward alone reached, those at which they left the others' states.
    winning_states: list[Shared]
    winning_calls: list[Shared]  # Calls that they alone made.


def threshold(rewards: Collection[float]) -> float | None:
    """Return the middle between the lowest and the highest reward; None if all are the same, or there is none."""
    if not rewards or min(rewards) == max(rewards):
        return None
    # Halved first: the sum of two finite rewards may be infinite.
    return min(rewards) / 2 + max(rewards) / 2


def compared(ways: Sequence[RolloutWay], above: float | None) -> GroupComparison:
    """Return the comparison of rollouts; those with a reward above `above` have a high one. O(calls)."""
    left = _by_item(
        {way.name: {(m.source, m.call, m.target) for m in way.moves if m.source != m.target} for way in ways}
    )
    parts = defaultdict[int, list[Shared]](list)
    for (source, call, target), names in left:
        parts[source].append(Shared(call, target, names))
    # Two texts that lead to one state are no parting.
    several = [(node, each) for node, each in parts.items() if len({shared.node for shared in each}) > 1]
    several.sort(key=lambda part: (-sum(len(shared.names) for shared in part[1]), part[0]))
    ends = _by_item({way.name: {way.end} for way in ways})
    limit = math.inf if above is None else above
    high = [way for way in ways if way.reward is not None and way.reward > limit]
    others = [way for way in ways if way.reward is not None and way.reward <= limit]
    known, made = ({item for way in others for item in items(way)} for items in (_nodes, _calls))
    entries = {way.name: {m.target for m in way.moves if m.source in known} - known for way in high}
    return GroupComparison(
        several, [Shared(None, node, names) for node, names in ends if len(names) > 1],
        [Shared(None, node, names) for node, names in _by_item(entries)],
        [Shared(call, None, names) for call, names in _by_item({way.name: _calls(way) - made for way in high})],
    )  # fmt: skip


def _nodes(way: RolloutWay) -> set[int]:
    return {way.start, *(move.target for move in way.moves)}


def _calls(way: RolloutWay) -> set[int]:
    return {move.call for move in way.moves}


def _by_item(items: Mapping[str, set[T]]) -> list[tuple[T, list[str]]]:
    """Return who has each item, those that most have first."""
    names = defaultdict[T, list[str]](list)
    for name, each in items.items():
        for item in each:
            names[item].append(name)
    return sorted(names.items(), key=lambda entry: (-len(entry[1]), entry[0]))
