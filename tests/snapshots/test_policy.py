"""Snapshot policy: which states are worth a snapshot, and which snapshots are evicted first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.policy import (
    Prospect,
    Reuse,
    at_stake_s,
    expected_uses,
    is_cheap,
    unneeded,
    unproven,
    value,
    victims,
    why,
    worth_keeping,
)

seconds = st.floats(0, 1e6)
prospects = st.builds(
    Prospect,
    name=st.uuids().map(str),
    saved_s=seconds,
    uses=st.floats(0, 1000),
    size_bytes=st.integers(0, 1 << 40),
    reproducible=st.booleans(),
    proven=st.booleans(),
    needed=st.booleans(),
    held=st.sampled_from(["", "pinned", "leased"]),
    doubtful=st.booleans(),
)
lists = st.lists(prospects, max_size=20, unique_by=lambda prospect: prospect.name)


def may_go(prospect: Prospect) -> bool:
    return prospect.proven and not prospect.held


@given(lists, st.integers(0, 1 << 42))
def test_held_and_unproven_snapshots_are_never_victims(kept: list[Prospect], excess: int) -> None:
    by_name = {prospect.name: prospect for prospect in kept}
    assert all(may_go(by_name[name]) for name in victims(kept, excess_bytes=excess))


@given(lists, st.integers(0, 1 << 42))
def test_only_what_no_rollout_needs_is_given_up_unproven(kept: list[Prospect], excess: int) -> None:
    by_name = {prospect.name: prospect for prospect in kept}
    for name in unneeded(kept, excess_bytes=excess):
        prospect = by_name[name]
        assert (prospect.needed, prospect.held) == (False, "")


@given(lists)
def test_what_waits_for_a_proof_may_be_reproducible(kept: list[Prospect]) -> None:
    expected = {p.name for p in kept if p.reproducible and not p.proven and not p.held}
    assert set(unproven(kept)) == expected


@given(lists, st.integers(0, 1 << 42))
def test_victims_free_enough_and_no_more(kept: list[Prospect], excess: int) -> None:
    sizes = {prospect.name: prospect.size_bytes for prospect in kept}
    chosen = victims(kept, excess_bytes=excess)
    freed = sum(sizes[name] for name in chosen)
    if freed < excess:
        # What frees nothing stays.
        assert set(chosen) == {prospect.name for prospect in kept if may_go(prospect) and prospect.size_bytes}
    else:
        assert not chosen or freed - sizes[chosen[-1]] < excess


@given(lists, st.integers(0, 1 << 42))
def test_the_least_valuable_are_evicted_first(kept: list[Prospect], excess: int) -> None:
    by_name = {prospect.name: prospect for prospect in kept}
    chosen = victims(kept, excess_bytes=excess)
    values = [value(by_name[name]) for name in chosen]
    assert values == sorted(values)
    freeing = [prospect for prospect in kept if may_go(prospect) and prospect.size_bytes]
    spared = [value(prospect) for prospect in freeing if prospect.name not in chosen]
    assert not values or all(values[-1] <= other for other in spared)


def state(name: str, parts: str, size_bytes: int, *, worth: float = 1.0, proven: bool = True) -> Prospect:
    return Prospect(name, worth, 1.0, size_bytes, tuple(parts), proven=proven)


def test_states_that_others_were_built_on_go_last() -> None:
    """A chain of layers, the newest first, is freed from its end, and no further than it must be."""
    chain = [state(f"s{depth}", "fedcba"[5 - depth :], 100_000, worth=depth) for depth in range(6)]
    assert victims(chain, excess_bytes=150_000) == ["s5", "s4"]
    assert victims(chain, excess_bytes=600_000) == ["s5", "s4", "s3", "s2", "s1", "s0"]
    # A rollout is at the end of the chain: nothing of it would be freed.
    held = [*chain[:5], replace(chain[5], held="leased")]
    assert victims(held, excess_bytes=600_000) == []


def test_states_with_the_same_parts_go_together() -> None:
    """Calls that changed the session alone have added no layer."""
    same = [state("a", "x", 100_000, worth=3), state("b", "x", 0, worth=2), state("c", "yx", 50_000)]
    assert victims(same, excess_bytes=10_000) == ["c"]
    assert victims(same, excess_bytes=60_000) == ["c", "a", "b"]
    assert victims([*same, state("d", "x", 0, proven=False)], excess_bytes=60_000) == ["c"]


stacks = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True), min_size=1, max_size=8)


@given(stacks, st.sets(st.integers(0, 7)))
def test_all_that_can_be_freed_is_freed(parts: list[list[str]], held: set[int]) -> None:
    """Whatever is shared: in the end no part is left that only states have which may go."""
    kept = [state(f"s{n}", "".join(own), 100, proven=n not in held) for n, own in enumerate(parts)]
    chosen = set(victims(kept, excess_bytes=1 << 40))
    needed = {part for prospect in kept if not prospect.proven for part in prospect.parts}
    for prospect in kept:
        assert prospect.proven or prospect.name not in chosen
        assert prospect.name in chosen or set(prospect.parts) <= needed


@given(lists, st.integers(0, 1 << 42), st.randoms())
def test_victims_do_not_depend_on_listing_order(kept: list[Prospect], excess: int, dice: object) -> None:
    shuffled = list(kept)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert victims(shuffled, excess_bytes=excess) == victims(kept, excess_bytes=excess)


@given(prospects, seconds, seconds, st.floats(0, 64))
def test_saving_more_never_makes_a_snapshot_worthless(
    prospect: Prospect, cost_s: float, more_s: float, uses: float
) -> None:
    better = replace(prospect, saved_s=prospect.saved_s + more_s, uses=prospect.uses + uses)
    assert worth_keeping(better, cost_s=cost_s) or not worth_keeping(prospect, cost_s=cost_s)


@given(prospects, seconds, seconds)
def test_costing_less_never_makes_a_snapshot_worthless(prospect: Prospect, cost_s: float, less_s: float) -> None:
    cheaper_s = max(0.0, cost_s - less_s)
    assert worth_keeping(prospect, cost_s=cheaper_s) or not worth_keeping(prospect, cost_s=cost_s)


@given(prospects, seconds)
def test_unreproducible_states_are_always_worth_keeping(prospect: Prospect, cost_s: float) -> None:
    assert worth_keeping(replace(prospect, reproducible=False), cost_s=cost_s)
    assert worth_keeping(replace(prospect, doubtful=True), cost_s=cost_s)


def test_states_without_expected_uses_are_not_kept() -> None:
    assert not worth_keeping(Prospect("s", saved_s=60.0, uses=0.0, size_bytes=0), cost_s=0.004)


def test_a_freeze_is_cheap_up_to_a_quarter_of_its_call() -> None:
    assert is_cheap(Reuse(), cost_s=0.005, made_s=0.02)
    assert not is_cheap(Reuse(), cost_s=0.0051, made_s=0.02)


def test_no_freeze_is_cheap_where_states_are_never_needed() -> None:
    reuse = Reuse()
    for _ in range(20_000):
        reuse = reuse.made(behind=0)
    assert not is_cheap(reuse, cost_s=0.0, made_s=1.0)
    assert is_cheap(reuse.demanded(), cost_s=0.0, made_s=1.0)


@given(prospects)
def test_the_reason_names_what_holds_a_snapshot(prospect: Prospect) -> None:
    reason = why(prospect)
    assert prospect.held in reason
    assert ("only way back" in reason) == (not prospect.reproducible)
    assert "uses expected" in reason


reuses = st.lists(st.one_of(st.integers(0, 8), st.none()), max_size=200)


def learnt(events: list[int | None]) -> Reuse:
    """Return the statistics after states were made (with so many rollouts behind them) and demanded (None)."""
    reuse = Reuse()
    for behind in events:
        reuse = reuse.demanded() if behind is None else reuse.made(behind)
    return reuse


@given(reuses, st.integers(0, 8), st.integers(0, 50), st.integers(0, 50))
def test_rollouts_behind_and_demand_raise_expected_uses(
    events: list[int | None], behind: int, visits: int, demand: int
) -> None:
    reuse = learnt(events)
    uses = expected_uses(reuse, behind=behind, visits=visits, demand=demand)
    assert uses > 0
    assert expected_uses(reuse, behind=behind + 1, visits=visits, demand=demand) > uses
    assert expected_uses(reuse, behind=behind, visits=visits, demand=demand + 1) > uses
    assert expected_uses(reuse, behind=behind, visits=visits + 1, demand=demand) < uses


def test_the_reuse_rate_follows_what_happens() -> None:
    never = learnt([3] * 2000)
    assert never.rate < 0.01
    often = never
    for _ in range(2000):
        often = often.made(1).demanded()
    assert often.rate == pytest.approx(1 / 1.5, rel=0.25)


@given(st.integers(0, 1000), st.integers(0, 20))
def test_doubtful_calls_raise_the_stake(replayed: int, doubtful: int) -> None:
    less, more = (at_stake_s(replayed=replayed, diverged=0, doubtful=n) for n in (doubtful, doubtful + 1))
    assert less < more <= 361.0
    if not doubtful:
        assert less <= 0.18
