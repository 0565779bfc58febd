"""What the kernel counts for each user, and so for all sandboxes of that user together, and for one sandbox.

A sandbox can take all inotify instances of the machine's user, or fill sockets with descriptors until no process
of that user may send another one. There is no limit for a part of a user's processes. So each supervisor checks now and
then whether anything is left. Only if nothing is, it counts what its own sandbox holds, which takes milliseconds.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable

from sandboxes.linux import syscalls as kernel

SHARE = 48
"""How many inotify instances and descriptors under way one sandbox may hold where the machine has none left. Programs
have one to five; the kernel's default for all of a user is 128 instances, and a soft limit of 1,024 descriptors."""

WATCH_S = 0.05
"""The shortest interval between two checks; a check takes 20 us."""


def are_exhausted() -> bool:
    """Return whether this user can have no further inotify instance, or send no further descriptor. 20 us."""
    try:
        os.close(kernel.inotify())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(ours, [b"x"], [ours.fileno()])
    except OSError as error:
        return error.errno in {errno.EMFILE, errno.ETOOMANYREFS}
    return False


def held(pids: Iterable[int]) -> int:
    """Return how many inotify instances and descriptors under way some processes hold; 10 us a descriptor.

    A process that hides its descriptors from others (PR_SET_DUMPABLE) counts as one that holds too many.
    """
    count = 0
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - pathlib is not loaded in pid 1
                link = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                count += link == "anon_inode:inotify"
                if link.startswith("socket:"):
                    count += _under_way(f"/proc/{pid}/fdinfo/{name}")
        except PermissionError:
            count += SHARE + 1
        except OSError:
            # The process or the descriptor is gone.
            continue
    return count


def _under_way(path: str) -> int:
    with open(path) as file:  # noqa: PTH123
        # How many descriptors wait in the socket to be received (proc_pid_fdinfo(5)).
        return next((int(line.split()[1]) for line in file if line.startswith("scm_fds:")), 0)


def watch(pids: Callable[[], Iterable[int]]) -> Callable[[], bool]:
    """Return a function that says whether a sandbox holds so much that other sandboxes of its user get nothing."""
    looked = time.monotonic()

    def takes_too_much() -> bool:
        nonlocal looked
        if time.monotonic() - looked < WATCH_S:
            return False
        looked = time.monotonic()
        return are_exhausted() and held(pids()) > SHARE

    return takes_too_much


class PidsLimit:
    """The limit of processes and threads of one sandbox, by its control group. Without one nothing is noticed.

    The kernel counts in `pids.events` how often fork(2) has failed because a limit was reached (cgroup-v2.rst). What a
    program makes of such a failure depends on moments: it waits, repeats, gives up, or has half of its output. So a
    call during which it happened has one answer, and its processes end.

    The count also rises when a group above has reached its limit, such as that of a container. The sandbox's own number
    of processes has not come to its limit then (`pids.peak`, Linux 6.1), and the failure is the machine's.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        """Open the files of the group among some directories that limits processes."""
        self._fds: dict[str, int] = {}
        self._noted = 0
        for group in groups:
            for name in ("events", "max", "peak", "current"):
                with contextlib.suppress(OSError):
                    self._fds[name] = os.open(f"{group}/pids.{name}", os.O_RDONLY | os.O_CLOEXEC)

    def begin(self) -> None:
        """Begin a call: what has happened before does not count."""
        self._noted = self._failures()

    def reached(self) -> str | None:
        """Return "pids" if the call's sandbox came to its limit, and "host" if the machine came to one; or None. 2 us."""
        if self._failures() == self._noted:
            return None
        limit, peak = self._number("max"), self._number("peak")
        return "host" if 0 < peak < limit else "pids"

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of the processes that the sandbox may have exist."""
        return 2 * self._number("current") > self._number("max")

    def _failures(self) -> int:
        return self._number("events")

    def _number(self, name: str) -> int:
        """Return the number in a file; 0 if the kernel has no such file, or it says "max"."""
        if (fd := self._fds.get(name)) is None:
            return 0
        last = os.pread(fd, 64, 0).split()[-1]
        return int(last) if last.isdigit() else 0
