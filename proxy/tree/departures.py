"""Departures: the nodes at which rollouts are likely to leave the tree next, where sandboxes should be ready.

A rollout that walks along recorded calls needs no sandbox until its first call that the tree does not know.

1. `outlook` estimates for one node how likely the next call is new, and to which nodes the known ones lead.
2. `departures` follows the rollouts `AHEAD` nodes through the tree and adds up where they are expected to leave it.
3. `targets` turns that, and what trainers requested, into the sandboxes that are worth making.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.tree.tree import Node

MIN_CHANCE = 0.2
"""Least chance of being used for which a sandbox is made. Chosen, not measured: at 0.2 four of five such sandboxes are
made in vain, and compete with calls for the machine."""
AHEAD = 8
"""How many nodes ahead of a rollout are considered: making a sandbox takes as long as a few known calls."""
_MAX_RECORDS = 64
"""How many records of a node are considered: enough to estimate how likely a new call is."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A node at which a ready sandbox is worth making."""

    node: Node
    chance: float  # How likely the sandbox is to be used, from 0 to 1.
    worth_s: float  # What it saves on average: its chance times what it saves if it is used.


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a rollout at a node is likely to do next. `leave` and all of `moves` add up to 1 at most."""

    leave: float  # Chance of a call that the tree does not know here.
    moves: Mapping[Node, float]  # Chance of moving to each node.


def outlook(node: Node) -> Outlook:
    """Return what a rollout at a node is likely to do next, observations left out. It looks at 64 records at most.

    The chance of an unseen call is Good and Turing's estimate: calls made once / calls made; without records 1.
    """
    made, once, stays = 1, 1, 0
    moves: Counter[Node] = Counter()
    for record, _ in zip(node.records.values(), range(_MAX_RECORDS), strict=False):
        times = 1 + record.hits
        made += times
        once += times == 1
        if record.target is node:
            stays += times
        else:
            moves[record.target] += times
    leave = once / made
    # An observation leads back to the same question, so the chances are those after any number of observations.
    known = 1 - leave
    ends = 1 - known * stays / max(1, made - 1)
    return Outlook(leave / ends, {to: known * times / (made - 1) / ends for to, times in moves.items()})


def departures(walkers: Mapping[Node, int]) -> dict[Node, float]:
    """Return at which nodes how many rollouts are expected to leave the tree, by how many are at each node."""
    expected: dict[Node, float] = {}
    for start, count in walkers.items():
        ahead = {start: 1.0}
        for _ in range(AHEAD):
            following: dict[Node, float] = {}
            for node, chance in ahead.items():
                view = outlook(node)
                expected[node] = expected.get(node, 0.0) + count * chance * view.leave
                for to, share in view.moves.items():
                    # Half the chance is enough to go on: several paths may lead to one node.
                    if chance * share >= MIN_CHANCE / 2 and not to.diverged:
                        following[to] = following.get(to, 0.0) + chance * share
            ahead = following
    return expected


def targets(
    walkers: Mapping[Node, int],
    requested: Mapping[Node, int],
    *,
    ready: Callable[[Node], int],
    saved_s: Callable[[Node], float],
) -> list[Departure]:
    """Return the sandboxes that are worth making, the most valuable first; a node once for each that it lacks.

    One sandbox at a node is enough unless more are requested: when one rollout has left there, the others know its
    call. `walkers` counts the rollouts at each node that have no sandbox at work. `ready` returns how many sandboxes
    are ready at a node, and `saved_s` what a ready one saves the call that uses it.
    """
    chances = departures(walkers)
    result = []
    for node in {**chances, **requested}:
        existing, count = ready(node), requested.get(node, 0)
        chance = min(1.0, chances.get(node, 0.0))
        if existing < count:
            result += [Departure(node, 1.0, saved_s(node))] * (count - existing)
        elif existing == 0 and chance >= MIN_CHANCE:
            result.append(Departure(node, chance, chance * saved_s(node)))
    return sorted(result, key=lambda target: (-target.worth_s, target.node.id))
