"""What pid 1 reads of its sandbox's control groups: whether a call came to the limit of processes, and what it used."""

# Theory of operation of the meter. A group counts all processes that are in it, and no process of a sandbox can leave
# its groups or write to them. So a difference of two readings is what the whole sandbox has used meanwhile, background
# processes and pid 1 included, and those too that were killed or have ended.
#
# 1. CPU time: `cpuacct.usage` in nanoseconds (cgroup-v1/cpuacct.rst), or `usage_usec` of `cpu.stat` (cgroup-v2.rst).
# 2. Memory: the most at one time. The kernel keeps a maximum, which is set back before the call: by version 1 always,
#    by version 2 since Linux 6.12, for this descriptor alone. Where it cannot be set back, it is the call's own only if
#    it has grown during the call.
# 3. Bytes of disks: `io.stat`. Version 1 counts no buffered writes, and many kernels count nothing at all there, so its
#    numbers are not used.

import contextlib
import os
import re
import time
from collections.abc import Iterable

from sandboxes.calls import ResourceUse
from sandboxes.linux.descriptors import close_all

PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
"""The files with the most memory at one time, of version 1 and of version 2."""
_KILLS = ("memory.oom_control", "memory.events")
"""The files with the number of processes that were killed for memory, of version 1 and of version 2."""
_READ_ONLY = ("pids.events", "pids.max", "pids.peak", "pids.current", "cpuacct.usage", "cpu.stat", "io.stat", *_KILLS)
"""Files of both versions; no machine has all. A limit is never opened for writing: pid 1 serves the agent."""
_MOST_BYTES = 1 << 16
"""How much of a file is read; `io.stat` has some 80 bytes for each disk."""
_NANOSECONDS, _MICROSECONDS = 1e9, 1e6
_CPU = re.compile(rb"^usage_usec (\d+)$", re.MULTILINE)
_OOM_KILL = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_READ, _WRITTEN = re.compile(rb" rbytes=(\d+)"), re.compile(rb" wbytes=(\d+)")


class GroupFiles:
    """The open files of a sandbox's groups, by name. A file that the kernel does not have is not there."""

    def __init__(self, groups: Iterable[str]) -> None:
        """Open the files in some directories; those of `PEAKS` for resets where the kernel has them."""
        self._fds: dict[str, int] = {}
        modes = [(name, os.O_RDONLY) for name in (*_READ_ONLY, *PEAKS)] + [(name, os.O_RDWR) for name in PEAKS]
        for group in groups:
            for name, mode in modes:
                with contextlib.suppress(OSError):
                    fd = os.open(f"{group}/{name}", mode | os.O_CLOEXEC)
                    close_all([self._fds.pop(name)] if name in self._fds else [])
                    self._fds[name] = fd

    def read(self, name: str) -> bytes | None:
        """Return what a file holds now; None without the file."""
        fd = self._fds.get(name)
        return None if fd is None else os.pread(fd, _MOST_BYTES, 0)

    def number(self, name: str) -> int | None:
        """Return the last number in a file; None without the file, or if it says "max"."""
        words = (self.read(name) or b"").split()
        return int(words[-1]) if words and words[-1].isdigit() else None

    def reset(self, name: str) -> bool:
        """Have a file that holds a maximum begin anew; return whether the kernel does that."""
        try:
            # Version 1 takes no other number (cgroup-v1/memory.rst), and version 2 takes any text (cgroup-v2.rst).
            return name in self._fds and os.pwrite(self._fds[name], b"0", 0) > 0
        except OSError:
            return False


class PidsLimit:
    """The limit of processes and threads of one sandbox, by its control group. Without one nothing is noticed."""

    # `pids.events` counts how often fork(2) failed because a limit was reached (cgroup-v2.rst). What a program makes of
    # that depends on moments, so such a call has one answer, and its processes end. The count also rises when a group
    # above, such as a container's, reached its limit: then the sandbox's own number (`pids.peak`, Linux 6.1) has not,
    # and it is the machine's failure.

    def __init__(self, files: GroupFiles) -> None:
        self._files, self._noted = files, 0

    def begin(self) -> None:
        """Begin a call: what has happened before does not count."""
        self._noted = self._failures()

    def reached(self) -> str | None:
        """Return "pids" if the call's sandbox came to its limit, "host" if the machine came to one; or None."""
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


class MemoryLimit:
    """The limit of memory of one sandbox, by its control group. Without one nothing is noticed."""

    def __init__(self, files: GroupFiles) -> None:
        self._files, self._noted = files, 0

    def begin(self) -> None:
        """Begin a call: what has happened before does not count."""
        self._noted = self._kills()

    @property
    def was_reached(self) -> bool:
        """Whether the kernel has killed a process of the sandbox for memory since `begin`."""
        return self._kills() != self._noted

    def _kills(self) -> int:
        counts = (_OOM_KILL.search(self._files.read(name) or b"") for name in _KILLS)
        return sum(int(count[1]) for count in counts if count is not None)


class ResourceMeter:
    """Measures one call after another. Without control groups nothing is known."""

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self._before = ResourceUse()
        self._is_reset = False

    def begin(self) -> None:
        """Begin a call."""
        self._is_reset = any(map(self._files.reset, PEAKS))
        self._before = self._read()

    def end(self) -> ResourceUse | None:
        """Return what the sandbox has used since `begin`; None if nothing is known."""
        before, now = self._before, self._read()
        is_own = self._is_reset or (now.peak_bytes or 0) > (before.peak_bytes or 0)
        use = ResourceUse(
            None if now.cpu_s is None or before.cpu_s is None else now.cpu_s - before.cpu_s,
            now.peak_bytes if is_own else None,
            _difference(before.read_bytes, now.read_bytes),
            _difference(before.written_bytes, now.written_bytes),
        )
        return None if use == ResourceUse() else use

    def _read(self) -> ResourceUse:
        disks = self._files.read("io.stat")
        peaks = [peak for peak in map(self._files.number, PEAKS) if peak is not None]
        return ResourceUse(
            self._cpu_s(),
            peaks[0] if peaks else None,
            None if disks is None else sum(map(int, _READ.findall(disks))),
            None if disks is None else sum(map(int, _WRITTEN.findall(disks))),
        )

    def _cpu_s(self) -> float | None:
        # The kernel adds the time of a thread that runs only now and then. Asked for this thread's, it adds it now
        # (`task_sched_runtime` in kernel/sched/core.c).
        time.thread_time()
        if (spent := self._files.number("cpuacct.usage")) is not None:
            return spent / _NANOSECONDS
        # The file of this name in version 1 is another one.
        found = _CPU.search(self._files.read("cpu.stat") or b"")
        return None if found is None else int(found[1]) / _MICROSECONDS


def _difference(before: int | None, now: int | None) -> int | None:
    # A disk that was removed takes its numbers along.
    return None if before is None or now is None else max(now - before, 0)
