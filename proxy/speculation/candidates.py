"""Candidates: the calls worth executing ahead of the rollouts that think (pure).

`walk` follows what a rollout may do from its node: calls that the tree knows lead on, and all other calls are
candidates. `ranked` adds up the chances of all rollouts and sorts by the seconds to be saved.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from proxy.tree.keys import CallKey
from proxy.tree.next_calls import History, LikelyCall, PastCall
from proxy.tree.tree import Node, Record, Tree

LEAST_CHANCE = 0.3
"""Least chance with which a call is executed ahead.

Measured with `bench/speculation.py` on the recorded telecom tasks: at 0.1, 0.2, 0.3 and 0.5 a saved second costs 17, 6,
5 and 8 CPU seconds, and 6, 10, 10 and 5 % of the misses become hits. Lower chances use the credit of the tasks up in
vain.
"""
LEAST_WORTH_S = 0.02
"""Least seconds that a call must save on average: what its restore and record cost the proxy in CPU time."""
_STEPS = 3
"""How many calls ahead of a rollout are considered: the agent thinks about as long as few calls take."""
_MAX_NODES = 64
"""How many steps of one rollout are looked at, the likeliest branches first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call that may be made next at a node where the tree does not know it.

    Attributes:
        tree: Tree of the node.
        node: The node.
        key: Key of the call.
        chance: How likely some rollout is to make it, from 0 to 1.
        seconds: How long its tool is expected to run.
    """

    tree: Tree
    node: Node
    key: CallKey
    chance: float
    seconds: float

    @property
    def place(self) -> tuple[int, CallKey]:
        """The number of the node and the key of the call: names the candidate, and holds no node in memory."""
        return self.node.id, self.key

    @property
    def worth_s(self) -> float:
        """Seconds that it saves on average, if it is executed before it is made."""
        return self.chance * self.seconds


def walk(
    tree: Tree,
    node: Node,
    history: History,
    likely: Callable[[History], Iterable[LikelyCall]],
    past: Callable[[Record], PastCall | None],
) -> Iterator[Candidate]:
    """Yield the calls that a rollout may make next and that the tree does not know where it makes them.

    Args:
        tree: The rollout's tree.
        node: Its node.
        history: Its calls so far.
        likely: Returns what may follow a history.
        past: Returns a record as a call of a history; None if it cannot be read.
    """
    ahead = [(node, history, 1.0, 0)]
    for _ in range(_MAX_NODES):
        if not ahead:
            return
        at, so_far, chance, steps = ahead.pop(0)
        for call in likely(so_far):
            together = chance * call.chance
            if together < LEAST_CHANCE:
                break
            record = at.records.get(call.key)
            if record is None:
                yield Candidate(tree, at, call.key, together, call.seconds)
            elif steps + 1 < _STEPS and not record.target.diverged:
                made = past(record)
                if made is not None:
                    ahead.append((record.target, (*so_far[-1:], made), together, steps + 1))
        ahead.sort(key=lambda branch: -branch[2])


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return each call once, with the chances of all rollouts together, the most seconds to be saved first."""
    best: dict[tuple[int, CallKey], Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.place)
        chance = candidate.chance if known is None else 1 - (1 - known.chance) * (1 - candidate.chance)
        best[candidate.place] = replace(candidate, chance=chance)
    worth = [candidate for candidate in best.values() if candidate.worth_s >= LEAST_WORTH_S]
    return sorted(worth, key=lambda candidate: (-candidate.worth_s, candidate.place))
