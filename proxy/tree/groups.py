"""Groups of rollouts, compared by the states that they reached: where they part and meet, and what winners did (pure).

Rollouts are aligned by nodes and not by the number of a call: one that reads more than another is still in the same
state. A call that changed nothing stays at its node.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Move(NamedTuple):
    """A call of a rollout: the numbers of its text, and of the nodes that it was made at and led to."""

    call: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Way:
    """A rollout on its way through the tree."""

    name: str
    start: int  # The node that it began at.
    end: int  # The node that it is at.
    reward: float | None
    moves: Sequence[Move]

    @property
    def nodes(self) -> set[int]:
        """All nodes that it was at."""
        return {self.start, *(move.target for move in self.moves)}


@dataclass(slots=True)
class Comparison:
    """What a group of rollouts has in common, and what not. Lists of names are in the order of the rollouts."""

    # By node: the rollouts that left it by each (call, target); only nodes that were left by more than one.
    parts: dict[int, dict[tuple[int, int], list[str]]] = field(default_factory=dict)
    # By node: the rollouts that are at it; only nodes with more than one.
    same_end: dict[int, list[str]] = field(default_factory=dict)
    # Of nodes that rollouts with a high reward alone reached, those at which they left the others' states.
    winning_nodes: dict[int, list[str]] = field(default_factory=dict)
    # Calls that rollouts with a high reward alone made, by the number of their text.
    winning_calls: dict[int, list[str]] = field(default_factory=dict)


def threshold(rewards: Collection[float]) -> float | None:
    """Return the middle between the lowest and the highest reward; None if all are the same, or there is none."""
    if not rewards or min(rewards) == max(rewards):
        return None
    # Halved first: the sum of two finite rewards may be infinite.
    return min(rewards) / 2 + max(rewards) / 2


def compared(ways: Sequence[Way], above: float | None) -> Comparison:
    """Return the comparison of rollouts; those with a reward above `above` have a high one. O(calls)."""
    result, left, ends = (
        Comparison(),
        defaultdict[int, dict[tuple[int, int], list[str]]](dict),
        defaultdict[int, list[str]](list),
    )
    for way in ways:
        ends[way.end].append(way.name)
        for move in way.moves:
            if move.source != move.target:
                names = left[move.source].setdefault((move.call, move.target), [])
                names += [] if way.name in names else [way.name]
    # Two texts that lead to one state are no parting.
    result.parts = {node: ways_on for node, ways_on in left.items() if len({target for _, target in ways_on}) > 1}
    result.same_end = {node: names for node, names in ends.items() if len(names) > 1}
    if above is not None:
        high = [way for way in ways if way.reward is not None and way.reward > above]
        others = [way for way in ways if way.reward is not None and way.reward <= above]
        known = {node for way in others for node in way.nodes}
        entries = {
            way.name: {m.target for m in way.moves if m.target not in known and m.source in known} for way in high
        }
        result.winning_nodes = _by_item(entries)
        made = {move.call for way in others for move in way.moves}
        result.winning_calls = _by_item({way.name: {move.call for move in way.moves} - made for way in high})
    return result


def _by_item(items: Mapping[str, set[int]]) -> dict[int, list[str]]:
    """Return who has each item, those that most have first."""
    names = defaultdict[int, list[str]](list)
    for name, each in items.items():
        for item in sorted(each):
            names[item].append(name)
    return dict(sorted(names.items(), key=lambda entry: (-len(entry[1]), entry[0])))
