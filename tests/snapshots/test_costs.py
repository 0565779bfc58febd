"""Costs: running means of what was measured, each kind of snapshot by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.costs import Costs, Mean, SnapshotKind


@given(st.lists(st.floats(1, 4), min_size=1, max_size=10))
def test_a_mean_is_exact_over_ten_measurements(seconds: list[float]) -> None:
    mean = Mean(1e9)
    for value in seconds:
        mean = mean.then(value)
    assert mean.seconds == pytest.approx(sum(seconds) / len(seconds))


def test_outliers_move_a_mean_little_lasting_changes_fully() -> None:
    mean = Mean(0.001)
    assert mean.then(10.0).seconds < 0.005
    for _ in range(60):
        mean = mean.then(10.0)
    assert mean.seconds == pytest.approx(10.0, rel=0.02)


@given(st.sampled_from(["files", "processes"]), st.floats(0, 0.002))
def test_each_kind_learns_its_own_costs(kind: SnapshotKind, seconds: float) -> None:
    other: SnapshotKind = "files" if kind == "processes" else "processes"
    costs = Costs().froze(kind, seconds).restored(kind, seconds)
    assert (costs.of(kind).freeze.seconds, costs.of(kind).restore.seconds) == pytest.approx((seconds, seconds))
    assert costs.of(other) == Costs().of(other)
