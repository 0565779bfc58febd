"""What all sandboxes of a user share: the one that holds too much of it is found."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandboxes.linux import user_counts

HOLD = {
    "inotify": "import ctypes; [ctypes.CDLL(None).inotify_init() for _ in range(60)]",
    "descriptors in a socket": "import socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0] * 60)",
    "pipes": "import fcntl, os; [fcntl.fcntl(os.pipe()[1], 1031, 1 << 20) for _ in range(13)]",
    "small pipes": "import os; [os.pipe() for _ in range(100)]",
    "hidden": "import ctypes; ctypes.CDLL(None).prctl(4, 0)",
    "few": "import ctypes; [ctypes.CDLL(None).inotify_init() for _ in range(5)]",
}


@contextmanager
def holder(what: str) -> Iterator[int]:
    """Run a process that holds something until the end of the context; yield its pid."""
    script = f"{HOLD[what]}\nprint('holds', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize(("what", "too_many"), [("inotify", True), ("descriptors in a socket", True), ("few", False),
                                               ("pipes", True), ("small pipes", False)])  # fmt: skip
def test_held_counts_what_processes_hold(what: str, too_many: bool) -> None:
    with holder(what) as pid:
        assert (user_counts.held([pid]) > user_counts.SHARE) is too_many


def test_process_that_hides_counts_as_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything here; a confined supervisor does not."""

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert user_counts.held([1]) > user_counts.SHARE


def test_processes_that_are_gone_hold_nothing() -> None:
    assert user_counts.held([2**22 - 1]) == 0


@pytest.mark.parametrize("number", [24, 109])
def test_refusals_of_the_kernel_mean_exhausted(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, "none left")

    assert not user_counts.are_exhausted()
    monkeypatch.setattr("sandboxes.linux.syscalls.inotify", refuse)
    assert user_counts.are_exhausted()
