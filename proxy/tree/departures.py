"""Where ready sandboxes should stand: at the nodes where rollouts are likely to leave the tree next (pure).

A rollout that walks along recorded calls needs no sandbox until its first call that the tree does not know. Where that
will be is told by the tree itself: how often which call followed at a node, and how many were made there only once.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.tree.tree import Node

MIN_CHANCE = 0.2
"""No sandbox is made for a lower chance of being used: too many would be made in vain."""
AHEAD = 8
"""How many nodes ahead of a rollout are looked at. Making a sandbox ready takes as long as a few known calls."""
_WIDEST = 64
"""Records of a node that are looked at: enough to tell how likely a new call is."""


@dataclass(frozen=True, slots=True)
class Target:
    """A node at which a ready sandbox is worth worth_s seconds: its chance of being used x what it saves."""

    node: Node
    chance: float
    worth_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What comes next at a node, as shares of one. leave: a call that nobody made here; moves: to these nodes."""

    leave: float
    moves: Mapping[Node, float]


def outlook(node: Node) -> Outlook:
    """Return what is likely to be called next at node, calls that change nothing left out. O(1): 64 records at most.

    The chance of a call that was not seen yet is that of Good and Turing: calls made once / calls made. Where nothing
    was called yet, it is 1.
    """
    made, once, stays = 1, 1, 0
    moves: Counter[Node] = Counter()
    for record, _ in zip(node.records.values(), range(_WIDEST), strict=False):
        times = 1 + record.hits
        made += times
        once += times == 1
        if record.observation:
            stays += times
        else:
            moves[record.target] += times
    leave = once / made
    # A call that changes nothing leads to the same question again: what counts is how it ends.
    known = 1 - leave
    ends = 1 - known * stays / max(1, made - 1)
    return Outlook(leave / ends, {to: known * times / (made - 1) / ends for to, times in moves.items()})


def departures(walkers: Mapping[Node, int]) -> dict[Node, float]:
    """Return how many of the rollouts that stand at these nodes are expected to leave the tree where.

    O(walkers' nodes x nodes ahead that are likely enough).
    """
    expected: dict[Node, float] = {}
    for start, count in walkers.items():
        ahead = {start: 1.0}
        for _ in range(AHEAD):
            following: dict[Node, float] = {}
            for node, chance in ahead.items():
                view = outlook(node)
                expected[node] = expected.get(node, 0.0) + count * chance * view.leave
                for to, share in view.moves.items():
                    if chance * share >= MIN_CHANCE / 2 and not to.diverged:
                        following[to] = following.get(to, 0.0) + chance * share
            ahead = following
    return expected


def targets(
    walkers: Mapping[Node, int],
    asked: Mapping[Node, int],
    *,
    ready: Callable[[Node], int],
    saved_s: Callable[[Node], float],
) -> list[Target]:
    """Return where sandboxes should be made ready, most valuable first; a node comes once for each that it lacks.

    walkers: how many rollouts that have no sandbox at work stand at a node. asked: how many sandboxes somebody wants at
    a node. ready: how many stand there. saved_s: seconds that one spares whoever comes.

    One is enough where nobody asked for more: when one rollout has left, the others know its call, and the next
    sandbox is made while they walk.
    """
    chances = departures(walkers)
    found = []
    for node in {**chances, **asked}:
        there, sure = ready(node), asked.get(node, 0)
        chance = min(1.0, chances.get(node, 0.0))
        if there < sure:
            found += [Target(node, 1.0, saved_s(node))] * (sure - there)
        elif there == 0 and chance >= MIN_CHANCE:
            found.append(Target(node, chance, chance * saved_s(node)))
    return sorted(found, key=lambda target: (-target.worth_s, target.node.id))
