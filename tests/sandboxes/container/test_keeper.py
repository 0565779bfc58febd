"""The keeper beside a container: what it reads of pid 1, and when."""

import resource
import subprocess
from typing import Any

import pytest

from sandboxes.container.keeper import cgroup_processes
from sandboxes.container.keeper.keeper import Keeper
from sandboxes.container.keeper.shell import read_limits


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


def test_limits_are_read_in_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may lack the right to ask for another user's limits; /proc shows them to it all the same."""
    with subprocess.Popen(["sh", "-c", "ulimit -n 77; ulimit -c 0; echo; read -r _"], stdin=-1, stdout=-1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        asked = read_limits(process.pid)
        assert asked["Max open files"] == (77, 77)

        def refuse(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(resource, "prlimit", refuse)
        assert read_limits(process.pid) == asked
        process.stdin.close()
    monkeypatch.undo()
    assert read_limits(process.pid) == {}
