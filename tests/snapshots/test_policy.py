"""Which states are kept, and which are given up first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.policy import Prospect, Reuse, at_stake_s, expected_uses, value, victims, why, worth_keeping

seconds = st.floats(0, 1e6)
prospects = st.builds(
    Prospect,
    name=st.uuids().map(str),
    saved_s=seconds,
    uses=st.floats(0, 1000),
    size_bytes=st.integers(0, 1 << 40),
    reproducible=st.booleans(),
    held=st.sampled_from(["", "pinned", "leased"]),
)
lists = st.lists(prospects, max_size=20, unique_by=lambda prospect: prospect.name)


def may_go(prospect: Prospect) -> bool:
    return prospect.reproducible and not prospect.held


@given(lists, st.integers(0, 1 << 42))
def test_what_is_held_or_cannot_be_rebuilt_is_never_given_up(kept: list[Prospect], excess: int) -> None:
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


@given(prospects, seconds, seconds, st.floats(0, 64))
def test_what_is_worth_keeping_stays_so_when_it_saves_more(
    prospect: Prospect, cost_s: float, more_s: float, uses: float
) -> None:
    better = replace(prospect, saved_s=prospect.saved_s + more_s, uses=prospect.uses + uses)
    assert worth_keeping(better, cost_s=cost_s) or not worth_keeping(prospect, cost_s=cost_s)


@given(prospects, seconds, seconds)
def test_what_is_worth_keeping_stays_so_when_it_costs_less(prospect: Prospect, cost_s: float, less_s: float) -> None:
    cheaper_s = max(0.0, cost_s - less_s)
    assert worth_keeping(prospect, cost_s=cheaper_s) or not worth_keeping(prospect, cost_s=cost_s)


@given(prospects, seconds)
def test_a_state_that_no_replay_reaches_is_always_worth_keeping(prospect: Prospect, cost_s: float) -> None:
    assert worth_keeping(replace(prospect, reproducible=False), cost_s=cost_s)


def test_a_state_that_nobody_will_want_is_not_worth_its_cost() -> None:
    assert not worth_keeping(Prospect("s", saved_s=60.0, uses=0.0, size_bytes=0), cost_s=0.004)


@given(prospects)
def test_why_one_is_kept_names_what_spares_it(prospect: Prospect) -> None:
    said = why(prospect)
    assert prospect.held in said
    assert ("only way back" in said) == (not prospect.reproducible)
    assert "uses expected" in said


reuses = st.lists(st.one_of(st.integers(0, 8), st.none()), max_size=200)


def learnt(events: list[int | None]) -> Reuse:
    """Return what is known after states were made (with so many rollouts behind them) and wanted (None)."""
    reuse = Reuse()
    for behind in events:
        reuse = reuse.demanded() if behind is None else reuse.made(behind)
    return reuse


@given(reuses, st.integers(0, 8), st.integers(0, 50), st.integers(0, 50))
def test_who_may_come_and_who_came_make_another_use_likelier(
    events: list[int | None], behind: int, passes: int, wanted: int
) -> None:
    reuse = learnt(events)
    uses = expected_uses(reuse, behind=behind, visits=passes, demand=wanted)
    assert uses > 0
    assert expected_uses(reuse, behind=behind + 1, visits=passes, demand=wanted) > uses
    assert expected_uses(reuse, behind=behind, visits=passes, demand=wanted + 1) > uses
    assert expected_uses(reuse, behind=behind, visits=passes + 1, demand=wanted) < uses


def test_the_rate_of_reuse_comes_to_what_happens_here_and_follows_when_that_changes() -> None:
    never = learnt([3] * 2000)
    assert never.rate < 0.01
    often = never
    for _ in range(2000):
        often = often.made(1).demanded()
    assert often.rate == pytest.approx(1 / 1.5, rel=0.25)


@given(st.integers(0, 1000), st.integers(0, 20))
def test_the_more_calls_in_doubt_the_more_is_at_stake(replayed: int, doubtful: int) -> None:
    less, more = (at_stake_s(replayed=replayed, diverged=0, doubtful=n) for n in (doubtful, doubtful + 1))
    assert less < more <= 361.0
    if not doubtful:
        assert less <= 0.18
