"""The scheduling of the proxy's threads."""

import ctypes
import os
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy import priority
from sandboxes.linux import syscalls as kernel
from tests.machine import needs_root

OWN = os.getpriority(os.PRIO_PROCESS, 0)


def slice_ns() -> int:
    """Return the time slice of this thread (sched_getattr(2)); 0 if the kernel has none for each thread."""
    attributes, number = ctypes.create_string_buffer(56), {"x86_64": 315, "aarch64": 275}[kernel.MACHINE]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 56, 0) == 0
    return int(struct.unpack("=IIQiIQQQII", attributes.raw)[5])


def scheduled() -> tuple[int, int, int]:
    """Return the niceness of this thread and of a process that it starts, and its time slice."""
    child = subprocess.run(["nice"], capture_output=True, check=True)
    return os.getpriority(os.PRIO_PROCESS, 0), int(child.stdout), slice_ns()


@needs_root
@pytest.mark.skipif(OWN != 0, reason="a proxy that was given a niceness keeps it")
def test_threads_go_first() -> None:
    """Sandboxes and their processes must not get the place of the proxy's threads, and cannot see it."""
    with priority.make_threads() as threads:
        niceness, of_child, own_slice_ns = threads.submit(scheduled).result(30)
    assert (niceness, of_child) == (priority.NICENESS, 0)
    assert own_slice_ns in {priority.SLICE_NS, 0}


def test_missing_rights_leave_the_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, a process may not lower its niceness."""
    given: list[int] = []

    def schedule(niceness: int, slice_ns: int) -> None:
        assert slice_ns == priority.SLICE_NS
        if niceness < OWN:
            raise PermissionError
        given.append(niceness)

    monkeypatch.setattr(priority, "schedule", schedule)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(priority.go_first).result(30)
    assert given == [OWN]


@pytest.mark.parametrize(
    ("leader", "niceness", "before", "after"),
    [(True, 0, 0, -10), (False, 0, 0, 0), (True, 5, 0, 0), (True, 0, 3, 3)],
    ids=["own session", "another's session", "given a niceness", "session given one"],
)
def test_own_session_goes_first(
    leader: bool, niceness: int, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of a terminal has other programs too, and an administrator's choice stays."""
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid() if leader else 1)
    monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    (file := tmp_path / "autogroup").write_text(f"/autogroup-7 nice {before}\n")
    priority.raise_session(file)
    assert file.read_text().split()[-1] == str(after)
