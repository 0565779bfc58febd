"""The timings of single calls are kept for a bounded number of calls."""

import tracemalloc

import pytest

from proxy.telemetry import timing
from proxy.telemetry.timing import AnswerTimes, Timing, Timings


def test_rollouts_that_ran_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MAX_CALLS", 5)
    timings = Timings()
    for rollout, turn in [(1, 0), (2, 0), (1, 1), (3, 0), (3, 1), (3, 2)]:
        timings.note(rollout, turn, Timing())
    assert [sorted(timings.of(rollout)) for rollout in (1, 2, 3)] == [[0, 1], [], [0, 1, 2]]


def test_one_rollout_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MAX_CALLS", 2)
    timings = Timings()
    for turn in range(4):
        timings.note(1, turn, Timing())
    timings.note(1, 3, Timing(tool_s=1.0))
    assert [timings.of(1)[turn].tool_s for turn in range(4)] == [0.0, 0.0, 0.0, 1.0]


def test_times_of_answers_are_kept_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that continues after a restart begins at a later turn; the oldest rollouts go first."""
    monkeypatch.setattr(timing, "_MAX_TIMES_BYTES", 2 * timing._ROLLOUT_BYTES + 3 * 8)
    times = AnswerTimes()
    for rollout, turn in [(1, 0), (1, 1), (2, 7), (2, 8), (3, 0)]:
        times.note(rollout, turn, turn + 0.5)
    assert [times.of(rollout) for rollout in (1, 2, 3)] == [{}, {7: 7.5, 8: 8.5}, {0: 0.5}]


def test_short_rollouts_stay_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout of one call takes 40 times the memory of its time."""
    monkeypatch.setattr(timing, "_MAX_TIMES_BYTES", 1 << 20)
    times = AnswerTimes()
    tracemalloc.start()
    try:
        for rollout in range(10_000):
            times.note(1_000_000 + rollout, 0, rollout + 0.5)
        assert tracemalloc.get_traced_memory()[0] < 1.3 * (1 << 20)
    finally:
        tracemalloc.stop()
    assert (times.of(1_000_000), times.of(1_009_999)) == ({}, {0: 9999.5})
