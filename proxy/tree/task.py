"""Tasks: a spec, the tree of its root state, and the rollouts that run in it."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from proxy.tree.rollout import Rollout
from proxy.tree.tree import Tree
from sandboxes.spec import EnvironmentSpec


@dataclass(slots=True, eq=False)
class Task:
    """A task that is open in this process."""

    name: str
    spec: EnvironmentSpec  # Environment in which new rollouts begin.
    tree: Tree  # Tree of that environment.
    origin: str | None  # The spec as JSON; None for a task on the default spec.
    created_at: float  # Unix time.
    used_at: float = 0.0  # When the task was last opened by name, on the proxy's monotonic clock.
    rollouts: dict[str, Rollout] = field(default_factory=dict)  # The running ones by name.

    @property
    def last_used_at(self) -> float:
        """When the task was opened or one of its calls answered; infinite while a call is in flight."""
        if any(rollout.waiting for rollout in self.rollouts.values()):
            return math.inf
        return max([self.used_at, *(rollout.used_at for rollout in self.rollouts.values())])


class Walkers:
    """The running rollouts of every tree."""

    def __init__(self) -> None:
        self._by_tree: dict[int, set[Rollout]] = {}

    def add(self, rollout: Rollout) -> None:
        """Add a rollout that begins."""
        self._by_tree.setdefault(rollout.tree.id, set()).add(rollout)

    def discard(self, rollout: Rollout) -> None:
        """Remove a rollout that has ended or is no longer in memory."""
        others = self._by_tree.get(rollout.tree.id, set())
        others.discard(rollout)
        if not others:
            self._by_tree.pop(rollout.tree.id, None)

    def of(self, tree_id: int) -> Collection[Rollout]:
        """Return the rollouts that walk a tree."""
        return self._by_tree.get(tree_id, ())
