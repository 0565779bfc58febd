"""How long rollouts think between two calls that need a sandbox, and so which sandbox is needed last (pure)."""

from dataclasses import dataclass

_WEIGHT = 0.3
"""How much the newest pause counts in the mean: rollouts think for longer at some calls than at others."""
_LATE = 1.5
"""How many times its usual pause a rollout may take and still count as thinking. After that, it has probably ended."""
_MOST = 20_000
"""Rollouts that are remembered; the oldest are forgotten first."""


@dataclass(slots=True)
class _Habit:
    left_at: float
    pause_s: float | None = None


class Habits:
    """The usual pauses of rollouts, which are named by numbers. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._of: dict[int, _Habit] = {}
        self._usual_s = 1.0

    def left(self, owner: int, now: float) -> None:
        """Note that a rollout's call has ended."""
        habit = self._of.setdefault(owner, _Habit(now))
        habit.left_at = now
        if len(self._of) > _MOST:
            del self._of[next(iter(self._of))]

    def came(self, owner: int, now: float) -> None:
        """Note that a rollout's call needs a sandbox."""
        habit = self._of.get(owner)
        if habit is None:
            return
        pause_s = now - habit.left_at
        before_s = pause_s if habit.pause_s is None else habit.pause_s
        habit.pause_s = before_s + _WEIGHT * (pause_s - before_s)
        self._usual_s += _WEIGHT * (pause_s - self._usual_s)

    def forget(self, owner: int) -> None:
        """Forget a rollout that has ended."""
        self._of.pop(owner, None)

    def left_later(self, owner: int, used_at: float) -> bool:
        """Return whether a rollout has made a call in another sandbox since it used one."""
        habit = self._of.get(owner)
        return habit is not None and habit.left_at > used_at

    def wait_s(self, owner: int, idle_s: float) -> float:
        """Return in how long a rollout probably needs its sandbox, which has been idle for `idle_s`."""
        habit = self._of.get(owner)
        pause_s = self._usual_s if habit is None or habit.pause_s is None else habit.pause_s
        # Who is late has the more to go the later he is, and who should be there now may come at any moment.
        return idle_s if idle_s > _LATE * pause_s else max(0.0, pause_s - idle_s)
