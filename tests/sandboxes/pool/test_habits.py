"""Of more rollouts than have room, those that have a sandbox keep it."""

from sandboxes.pool.habits import Habits

PAUSE_S = 8.0
ROLLOUTS, ROOM = 20, 10


def test_rollouts_that_take_turns_do_not_take_each_others_sandboxes() -> None:
    """By recency, each would close the one that is needed next, and all calls would restore a state."""
    habits = Habits()
    used_at: dict[int, float] = {}
    found = dict.fromkeys(range(8), 0)
    for turn in found:
        for rollout in range(ROLLOUTS):
            now = turn * PAUSE_S + rollout * PAUSE_S / ROLLOUTS
            habits.came(rollout, now)
            found[turn] += rollout in used_at
            if rollout not in used_at and len(used_at) == ROOM:
                at, last = now, dict(used_at)
                del used_at[max(last, key=lambda owner: habits.wait_s(owner, at - last[owner]))]
            used_at[rollout] = now
            habits.left(rollout, now)
    # The first turns teach how long each thinks.
    assert all(found[turn] >= ROOM - 2 for turn in (4, 5, 6, 7)), found


def test_who_is_late_comes_after_those_who_think() -> None:
    habits = Habits()
    habits.left(1, 0.0)
    habits.came(1, 2.0)
    assert habits.wait_s(1, 0.5) == 1.5
    # Now is as good as any moment.
    assert habits.wait_s(1, 2.5) == 0.0
    assert habits.wait_s(1, 60.0) == 60.0


def test_who_is_unknown_thinks_as_long_as_the_others() -> None:
    habits = Habits()
    for turn in range(50):
        habits.left(1, turn * 5.0)
        habits.came(1, turn * 5.0 + 5.0)
    assert 4.9 < habits.wait_s(2, 0.0) <= 5.0
    habits.forget(1)
    assert habits.wait_s(1, 0.0) == habits.wait_s(2, 0.0)
