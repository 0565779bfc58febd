"""An operation on files as the supervisor runs it: in a child, with limits of time and disk like a command."""

# Theory of operation.
#
# The child works on paths that the agent controls. It may meet a FIFO without a writer, a directory without end, or a
# file that does not fit into memory. Then only the child is killed.

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from select import POLLHUP, POLLIN, poll
from typing import NoReturn

from sandboxes.guest.files import operations
from sandboxes.guest.files.disk_watch import WATCH_S
from sandboxes.guest.shell import Output
from sandboxes.ipc.messages import FileOutcome, RunFileOperation
from sandboxes.linux.descriptors import Opened, close_all


def run(
    request: RunFileOperation,
    body: bytes,
    fds: Sequence[int],
    enter: Callable[[], None],
    over_disk: Callable[[], str | None],
) -> tuple[FileOutcome, bytes]:
    """Run an operation in a child, once `enter` has dropped the rights that the agent lacks; return its outcome."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    # The supervisor watches time and disk while it reads, so it must never wait in read(2).
    os.set_blocking(reading, False)
    try:
        pid = os.fork()
    except OSError as error:
        # The sandbox has reached its limit of processes.
        close_all((reading, writing, *fds))
        return operations.outcome_of(
            operations.problem(507, "File operation failed", f"no process can be started for it: {error.strerror}")
        )
    if pid == 0:
        _operate(request, body, fds, enter, writing)
    # The child has the last writing end then, so its death shows as the end of the pipe.
    close_all((writing, *fds))
    # Before the supervisor, which collects all that has ended (`over_disk`), can have collected it.
    with Opened(os.pidfd_open(pid)) as child:
        # Not `waitid`: a child that is stuck would keep the supervisor waiting.
        data, whole = _read_all(reading, request.timeout_s, over_disk)
        os.close(reading)
        # The child alone: file operations start no processes, and others may have started some meanwhile.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        # After SIGKILL this waits for milliseconds at most, unless the kernel itself is stuck.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, child, os.WEXITED)
    return operations.parse_result(data, whole=whole)


def _operate(
    request: RunFileOperation, body: bytes, fds: Sequence[int], enter: Callable[[], None], result: int
) -> NoReturn:
    try:
        # First of all: no line of the operation runs with a right that the agent lacks.
        enter()
        operations.run_apart(request.tool, request.arguments, body, result, fds[0] if fds else None)
    finally:
        os._exit(1)


def _read_all(fd: int, timeout_s: float, over_disk: Callable[[], str | None]) -> tuple[bytes, bool]:
    output = Output(fd)
    deadline = time.monotonic() + timeout_s
    waiting = poll()
    waiting.register(fd, POLLIN | POLLHUP)
    while time.monotonic() < deadline and over_disk() is None:
        events = waiting.poll(WATCH_S * 1000)
        output.drain(sys.maxsize)
        # Hung up and nothing left to read: the child has closed its end, or has died.
        if events and events[0][1] & POLLHUP and not events[0][1] & POLLIN:
            return bytes(output.data), True
    return bytes(output.data), False
