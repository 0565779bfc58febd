"""How long is waited for who is about to end or to rest, on a machine that has no time for it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sandboxes.linux.processes import GRACE_S, Grace, rests

_BUSY = "print(flush=True)\nwhile True: pass"
_ASLEEP = "import time; time.sleep(0.01); print(flush=True); time.sleep(1000)"


@contextmanager
def started(program: str, *, idle: bool = False) -> Iterator[int]:
    """Run a program of Python on the first CPU. idle: only when nobody else wants that."""
    command = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            if idle:
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            yield process.pid
        finally:
            process.kill()


def waited(pid: int, within_s: float) -> float:
    """Wait until the grace of a process is over, at most within_s; return for how long."""
    grace, began = Grace(), time.monotonic()
    while not grace.over([(pid, 1)]) and time.monotonic() - began < within_s:
        pass
    return time.monotonic() - began


def test_who_sleeps_has_its_grace_and_no_more() -> None:
    with started(_ASLEEP) as pid:
        assert GRACE_S <= waited(pid, 20.0) < 20.0


def test_who_waits_for_a_cpu_has_more_time_for_it_does_not_have_its_own() -> None:
    with started(_BUSY), started(_BUSY, idle=True) as pid:
        assert waited(pid, 5 * GRACE_S) >= 5 * GRACE_S


def test_nobody_has_more_than_a_second() -> None:
    with started(_BUSY), started(_BUSY, idle=True) as pid:
        assert waited(pid, 20.0) < 20.0


def test_what_works_is_looked_at_until_it_is_as_new_or_sleeps() -> None:
    answers = iter([False, False, True])
    with started(_BUSY) as busy, started(_ASLEEP) as asleep:
        assert rests(busy, lambda: next(answers))
        assert not rests(asleep, lambda: False)
