"""Which tasks move to which members, so that no member has much more than the others (pure).

The load of a task is one, and one more for each of its running rollouts. The load of a member is that of its tasks.
"""

from bisect import bisect
from collections.abc import Mapping
from typing import NamedTuple

BOUND = 1.2
"""No member is to have more than this multiple of the mean load. First touch was simulated to leave 1.33 with 1,000.
Nearer to 1, a few rollouts that begin or end make the next plan move tasks again."""


class Move(NamedTuple):
    """A task that is to move."""

    task: str
    source: str
    target: str  # The member that is to take it over.
    load: int


def loads_of(tasks: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the load of each member. `tasks` has the load of each of its tasks, by member and task."""
    return {member: sum(loads.values()) for member, loads in tasks.items()}


def plan_moves(tasks: Mapping[str, Mapping[str, int]]) -> list[Move]:
    """Return the moves after which no member has more than its bound, or which come as near to it as whole tasks can.

    Each move takes the most loaded member above the bound and the least loaded one, and of the first one's tasks the
    one that makes their loads most equal. The larger of the two loads becomes smaller with each move, and each task
    moves once at most. O(members) for each move.
    """
    loads, moves = loads_of(tasks), list[Move]()
    most = BOUND * sum(loads.values()) / len(loads)
    # A task that has moved is in no list any more.
    left = {member: sorted((load, task) for task, load in own.items()) for member, own in tasks.items()}
    above = {member for member, load in loads.items() if load > most}
    while above:
        source = max(above, key=lambda member: (loads[member], member))
        target = min(loads, key=lambda member: (loads[member], member))
        gap, own = loads[source] - loads[target], left[source]
        # The neighbours of half the gap. A task as large as the gap would only exchange the two loads.
        at = bisect(own, (gap / 2, ""))
        near = [number for number in (at - 1, at) if 0 <= number < len(own) and own[number][0] < gap]
        if not near:
            above.discard(source)
            continue
        load, task = own.pop(min(near, key=lambda number: abs(2 * own[number][0] - gap)))
        moves.append(Move(task, source, target, load))
        loads[source] -= load
        loads[target] += load
        above = {member for member in (*above, target) if loads[member] > most}
    return moves
