"""The keeper beside a container: what it reads of pid 1, and when."""

from typing import Any

import pytest

from sandboxes.container.keeper import cgroup_processes
from sandboxes.container.keeper.keeper import Keeper


class NotReadyError(Exception):
    """The anchor of the test does not start."""


class Anchor:
    def ready(self, _within_s: float) -> bool:
        raise NotReadyError


class Members:
    pid = 1


def unused(*arguments: Any) -> tuple[Any, ...]:
    """Return arguments that the type checker takes for anything."""
    return arguments


def test_variables_are_read_after_the_anchor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after its start, pid 1 of a container is `runc init`, whose variables no session may inherit."""

    def too_early(_pid: int) -> Any:
        raise AssertionError("pid 1 was read before the anchor ran")

    monkeypatch.setattr(cgroup_processes, "environment", too_early)
    monkeypatch.setattr(cgroup_processes, "ids", too_early)
    with pytest.raises(NotReadyError):
        Keeper(*unused(None, Members(), Anchor(), None, None, None))
