"""The limit of processes and threads that a sandbox has by its control group, and whether a call has come to it."""

import contextlib
import os
from collections.abc import Iterable


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
        """Return "pids" if the call's sandbox came to its limit, "host" if the machine came to one; or None. 2 us."""
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
