"""The keeper beside a container: what it reads of pid 1, and when."""

import os
import resource
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes.container.boot_scripts import FIFOS
from sandboxes.container.keeper import cgroup_processes
from sandboxes.container.keeper.anchor import ContainerAnchor
from sandboxes.container.keeper.keeper import Keeper
from sandboxes.container.keeper.shell import read_limits
from sandboxes.container.keeper.start import _execute
from sandboxes.guest.anchors.anchor import ShellStartError


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


def test_the_runtime_inherits_nothing(tmp_path: Path) -> None:
    """No descriptor, no variable and no ignored signal: all that it has, a container may get."""
    shown = tmp_path / "shown"
    look = f"grep SigIgn /proc/$$/status > {shown}; ls /proc/$$/fd >> {shown}; env >> {shown}"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        child = os.fork()
        if child == 0:
            _execute(["/bin/sh", "-c", look], os.getppid())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(reading)
        os.close(writing)
    ignored, *rest = shown.read_text().splitlines()
    assert int(ignored.split()[1], 16) == 0
    assert [line for line in rest if line.isdigit()] in (["0", "1", "2"], ["0", "1", "10", "2"])
    assert {line.split("=")[0] for line in rest if "=" in line} <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}


def test_orders_are_for_the_anchor_that_was_met(tmp_path: Path) -> None:
    """None is written for one that has ended, or whose pid is another process's by now."""
    for name in FIFOS:
        os.mkfifo(tmp_path / name)
    with subprocess.Popen(["sleep", "60"]) as process, ExitStack() as ends:
        ends.callback(process.kill)
        init = os.pidfd_open(process.pid)
        members: Any = SimpleNamespace(pid=0, init=init, find=lambda _inner: process.pid)
        anchor = ContainerAnchor(tmp_path, members)
        orders = os.open(tmp_path / "orders", os.O_RDONLY | os.O_NONBLOCK)
        remembered = {"inner": process.pid, "pids": [], "bash": True}
        anchor.adopt(remembered | {"inner": process.pid + 1})
        with pytest.raises(ShellStartError, match="anchor has been killed"):
            anchor.start("1")
        anchor.adopt(remembered)
        anchor.collect(7)
        assert os.read(orders, 100) == b"wait 7\n"
        process.kill()
        process.wait()
        with pytest.raises(ShellStartError, match="anchor has been killed"):
            anchor.start("1")
        with pytest.raises(BlockingIOError):
            os.read(orders, 100)
    for fd in (init, orders):
        os.close(fd)
