"""Which states are kept, and which are given up first."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from snapshots.policy import Prospect, value, victims, worth_keeping

seconds = st.floats(0, 1e6)
prospects = st.builds(
    Prospect,
    name=st.uuids().map(str),
    replay_s=seconds,
    passes=st.integers(0, 1000),
    live=st.integers(0, 64),
    size_bytes=st.integers(0, 1 << 40),
    reproducible=st.booleans(),
    protected=st.booleans(),
)
lists = st.lists(prospects, max_size=20, unique_by=lambda prospect: prospect.name)


def may_go(prospect: Prospect) -> bool:
    return prospect.reproducible and not prospect.protected


@given(lists, st.integers(0, 1 << 42))
def test_what_is_protected_or_cannot_be_rebuilt_is_never_given_up(kept: list[Prospect], excess: int) -> None:
    by_name = {prospect.name: prospect for prospect in kept}
    assert all(may_go(by_name[name]) for name in victims(kept, excess_bytes=excess))


@given(lists, st.integers(0, 1 << 42))
def test_enough_is_given_up_where_that_is_possible_and_no_more(kept: list[Prospect], excess: int) -> None:
    sizes = {prospect.name: prospect.size_bytes for prospect in kept}
    chosen = victims(kept, excess_bytes=excess)
    freed = sum(sizes[name] for name in chosen)
    if freed < excess:
        assert set(chosen) == {prospect.name for prospect in kept if may_go(prospect)}
    else:
        assert not chosen or freed - sizes[chosen[-1]] < excess


@given(lists, st.integers(0, 1 << 42))
def test_the_least_value_goes_first(kept: list[Prospect], excess: int) -> None:
    by_name = {prospect.name: prospect for prospect in kept}
    chosen = victims(kept, excess_bytes=excess)
    values = [value(by_name[name]) for name in chosen]
    assert values == sorted(values)
    spared = [value(prospect) for prospect in kept if may_go(prospect) and prospect.name not in chosen]
    assert not values or all(values[-1] <= other for other in spared)


@given(lists, st.integers(0, 1 << 42), st.randoms())
def test_the_order_in_which_they_are_listed_does_not_matter(kept: list[Prospect], excess: int, dice: object) -> None:
    shuffled = list(kept)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert victims(shuffled, excess_bytes=excess) == victims(kept, excess_bytes=excess)


@given(prospects, seconds, seconds, st.integers(0, 1000), st.integers(0, 64))
def test_what_is_worth_keeping_stays_so_when_it_saves_more(
    prospect: Prospect, cost_s: float, more_s: float, passes: int, live: int
) -> None:
    better = replace(
        prospect,
        replay_s=prospect.replay_s + more_s,
        passes=prospect.passes + passes,
        live=prospect.live + live,
    )
    assert worth_keeping(better, cost_s=cost_s) or not worth_keeping(prospect, cost_s=cost_s)


@given(prospects, seconds, seconds)
def test_what_is_worth_keeping_stays_so_when_it_costs_less(prospect: Prospect, cost_s: float, less_s: float) -> None:
    cheaper_s = max(0.0, cost_s - less_s)
    assert worth_keeping(prospect, cost_s=cheaper_s) or not worth_keeping(prospect, cost_s=cost_s)


@given(prospects, seconds)
def test_a_state_that_no_replay_reaches_is_always_worth_keeping(prospect: Prospect, cost_s: float) -> None:
    assert worth_keeping(replace(prospect, reproducible=False), cost_s=cost_s)


def test_a_state_that_nobody_will_want_is_not_worth_its_cost() -> None:
    assert not worth_keeping(Prospect("s", replay_s=60.0, passes=0, live=0, size_bytes=0), cost_s=0.004)
