"""Waiting for processes that are about to end or to fall asleep, on a machine that is too busy for them."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from sandboxes.linux import processes
from sandboxes.linux.processes import GRACE_S, Grace, wait_until_asleep

_BUSY = "print(flush=True)\nwhile True: pass"
_ASLEEP = "import time; time.sleep(0.01); print(flush=True); time.sleep(1000)"


@contextmanager
def started(program: str, *, idle: bool = False) -> Iterator[int]:
    """Run a Python program on the first CPU, or with `idle` only while no other process wants that CPU."""
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


def is_ending(pid: int) -> bool:
    return processes.is_ending(pid, processes.stat_fields(pid) or [])


def waited(pid: int, within_s: float) -> float:
    """Wait until the grace of a process has expired, at most `within_s`; return how long that took."""
    grace, began = Grace(), time.monotonic()
    while not grace.expired([(pid, 1)]) and time.monotonic() - began < within_s:
        pass
    return time.monotonic() - began


def test_grace_of_sleeping_process_is_short() -> None:
    with started(_ASLEEP) as pid:
        assert GRACE_S <= waited(pid, 20.0) < 20.0


def test_waiting_for_cpu_uses_no_grace() -> None:
    with started(_BUSY), started(_BUSY, idle=True) as pid:
        assert waited(pid, 5 * GRACE_S) >= 5 * GRACE_S


def test_grace_has_an_upper_limit() -> None:
    with started(_BUSY), started(_BUSY, idle=True) as pid:
        assert waited(pid, 20.0) < 20.0


def test_wait_ends_with_condition_or_sleep() -> None:
    answers = iter([False, False, True])
    with started(_BUSY) as busy, started(_ASLEEP) as asleep:
        assert wait_until_asleep(busy, lambda: next(answers))
        assert not wait_until_asleep(asleep, lambda: False)


@pytest.mark.parametrize("signalled", ["signal.signal(15, lambda *_: None)", "signal.pthread_sigmask(0, [15])"])
def test_process_survives_signals_that_cannot_end_it(signalled: str) -> None:
    """It is busy, and shows a signal that it catches, as long as it gets no CPU, or one that it blocks."""
    with started(_BUSY), started(f"import signal; {signalled}\n{_BUSY}", idle=True) as pid:
        os.kill(pid, signal.SIGTERM)
        assert not is_ending(pid)


@pytest.mark.parametrize("line", ["SigPnd", "ShdPnd"])
def test_process_that_was_killed_ends_once_it_has_a_cpu(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Until then it shows the signal, in one of two lines."""
    masks = {"SigPnd": 0, "ShdPnd": 0, "SigBlk": 2, "SigCgt": 1 << 16} | {line: 1 << 14}
    status = "".join(f"{name}:\t{mask:016x}\n" for name, mask in masks.items()).encode()
    shown = {"stat": b"1 (a) R 1 1 1 0 -1 4194304 0", "status": status}
    monkeypatch.setattr(processes, "shown", lambda path: shown[path.rpartition("/")[2]])
    assert is_ending(os.getpid())


def test_process_without_its_first_thread_goes_on() -> None:
    """The first thread has ended, which the process shows as if it all had."""
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()"
    with started(f"{thread}; import ctypes; print(flush=True); ctypes.CDLL(None).pthread_exit(None)") as pid:
        while not processes.shown(f"/proc/{pid}/stat").rpartition(b")")[2].startswith(b" Z"):
            time.sleep(0.001)
        assert not is_ending(pid)


def test_process_that_cannot_be_read_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pid 1 may have no descriptor left, which a command decides. Then it finds no process, and must raise."""

    def refuse(path: str) -> bytes:
        raise OSError(errno.EMFILE, path)

    monkeypatch.setattr(processes, "shown", refuse)
    for look in (processes.list_processes, partial(processes.ipc_objects, "shm")):
        with pytest.raises(OSError, match=r"stat|sysvipc"):
            look()


@pytest.mark.parametrize("release", ["6.1", "6.2"])
def test_descriptors_are_known_on_every_kernel(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Before Linux 6.2 the directory of descriptors has no size, and a shell with its own descriptors holds no more."""
    look = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        seen = look(path, **options)
        sized = release == "6.2" or not str(path).endswith("/fd")
        return seen if sized else os.stat_result((*seen[:6], 0, *seen[7:10]))

    monkeypatch.setattr(os, "stat", stat)
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=2) as process:
        folder = f"/proc/{process.pid}/fd"
        own = {int(fd): os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}  # noqa: PTH115, PTH208
        without = {fd: name for fd, name in own.items() if fd != 2}
        try:
            assert processes.has_descriptors(process.pid, own)
            assert not processes.has_descriptors(process.pid, without)
            assert not processes.has_descriptors(process.pid, own | {2: "/elsewhere"})
        finally:
            process.kill()
