"""Which tasks move between members: some cases by hand, and what holds for all."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.balance import BOUND, Move, loads_of, plan_moves

MEMBERS = st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=6)
"""The loads of the tasks of each member."""


def named(members: list[list[int]]) -> dict[str, dict[str, int]]:
    """Return loads under names of members, and of tasks that differ."""
    return {f"m{at}": {f"t{at}.{n}": load for n, load in enumerate(loads)} for at, loads in enumerate(members)}


@given(MEMBERS)
def test_moves_make_the_largest_load_smaller(members: list[list[int]]) -> None:
    """No move raises the maximum, no task moves twice, and a member stays above its bound only if no move helps."""
    tasks = named(members)
    loads, left = loads_of(tasks), {member: dict(own) for member, own in tasks.items()}
    most = BOUND * sum(loads.values()) / len(loads)
    moves = plan_moves(tasks)
    assert bool(moves) <= (max(loads.values()) > most)
    assert len({move.task for move in moves}) == len(moves)
    for move in moves:
        assert loads[move.source] > most
        assert left[move.source].pop(move.task) == move.load
        before = loads[move.source]
        loads[move.source] -= move.load
        loads[move.target] += move.load
        assert max(loads[move.source], loads[move.target]) < before
    for member, own in left.items():
        gap = loads[member] - min(loads.values())
        assert loads[member] <= most or all(load >= gap for load in own.values())


def test_a_new_member_gets_its_share() -> None:
    """Of two members with twelve equal tasks together, each hands over two to the new one: as few as suffice."""
    tasks = {"a": dict.fromkeys("abcdef", 3), "b": dict.fromkeys("ghijkl", 3), "c": dict[str, int]()}
    moves = plan_moves(tasks)
    assert all(move.target == "c" for move in moves)
    assert sorted(move.source for move in moves) == ["a", "a", "b", "b"]


def test_one_large_task_stays() -> None:
    """A task that is more than a member's share moves nowhere; the small ones leave its member."""
    assert plan_moves({"a": {"large": 90}, "b": {}}) == []
    assert plan_moves({"a": {"large": 90, "small": 10}, "b": {}}) == [Move("small", "a", "b", 10)]
