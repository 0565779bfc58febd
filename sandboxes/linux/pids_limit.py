"""The limit of processes and threads that a sandbox has by its control group, and whether a call has come to it."""

from sandboxes.linux.group_files import GroupFiles


class PidsLimit:
    """The limit of processes and threads of one sandbox, by its control group. Without one nothing is noticed.

    The kernel counts in `pids.events` how often fork(2) has failed because a limit was reached (cgroup-v2.rst). What a
    program makes of such a failure depends on moments: it waits, repeats, gives up, or has half of its output. So a
    call during which it happened has one answer, and its processes end.

    The count also rises when a group above has reached its limit, such as that of a container. The sandbox's own number
    of processes has not come to its limit then (`pids.peak`, Linux 6.1), and the failure is the machine's.
    """

    def __init__(self, files: GroupFiles) -> None:
        self._files, self._noted = files, 0

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
        return self._files.number(f"pids.{name}") or 0
