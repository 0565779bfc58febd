"""How many sandboxes this machine has room for at the moment: by memory, open files and processes.

Every limit that the kernel puts on this process counts, those of its control groups included, and each is looked at
again while the proxy works: what agents' commands take is no room.
"""

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sandboxes.linux import cgroups

SANDBOX_BYTES = 12 << 20
"""Memory of an idle sandbox: 8 to 10 MB were measured, of pid 1, its template, the shell and the kernel's part."""
SANDBOX_DESCRIPTORS = 8
"""File descriptors that the proxy holds for a sandbox, rounded up: 5 were measured."""
SANDBOX_PIPE_PAGES, _SERVER_PIPE_PAGES = 12, 48
"""Pages that the pipes to a sandbox's shells may hold between calls, and how many more a tool server has. The kernel
bounds them for each user (pipe(7)): beyond, answers may show that pipes are small, and are their rollouts' own
(`linux/user_counts`)."""
SANDBOX_PROCESSES = 8
"""Processes of a sandbox: 3 were measured, and a command has some of its own."""
_MEMORY_SHARE = 2
"""One part in so many of the memory is for sandboxes that wait: other programs may need theirs suddenly."""
_RESERVE_SHARE = 8
"""One part in so many of the memory, and of the processes, stays free for what agents' commands take."""
_MOST = 4096
"""More are not live at once, whatever the machine has: an estimate of what one proxy can serve."""
_MOST_FILES = 1 << 20
"""The kernel's own limit of one process's files (fs.nr_open)."""
_LOOK_S = 1.0
"""How long a look counts: it costs half a millisecond."""


class RoomBound(NamedTuple):
    """The most sandboxes, what bounds them, and what helps, as parts of a sentence."""

    most: int
    by: str
    remedy: str


class Room:
    """The room for sandboxes of one proxy."""

    def __init__(self, setting: int | None, *, reserve_bytes: int = 0, workers: int = 1, other_files: int = 0) -> None:
        """Take the setting `max_sandboxes`, if there is one; else go by the machine, which `workers` share equally."""
        self._setting, self._reserve_bytes, self._workers = setting, reserve_bytes, workers
        self._other_files = other_files
        self._looked_at, self._bound = -_LOOK_S, RoomBound(1, "", "")
        self._is_short, self._most_by_pipes = False, _MOST

    def note_shortage(self) -> None:
        """Note that nothing was left of what all sandboxes share: pipes, if each has tool servers. Fewer have room."""
        self._is_short = True

    def bound(self, live: int) -> RoomBound:
        """Return the most sandboxes with which the machine has room for all, `live` ones of which there are already."""
        if self._setting is not None:
            return RoomBound(self._setting, "max_sandboxes", "raise max_sandboxes")
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at, self._bound = now, min(self._bounds(live))
        return self._bound

    def _bounds(self, live: int) -> Iterator[RoomBound]:
        yield RoomBound(_MOST // self._workers, "the most that one proxy serves", "use more machines (docs/cluster.md)")
        total = _total_bytes()
        free = (available_bytes() - max(self._reserve_bytes, total // _RESERVE_SHARE)) // self._workers
        most = min(live + free // SANDBOX_BYTES, total // _MEMORY_SHARE // self._workers // SANDBOX_BYTES)
        yield RoomBound(max(1, most), "memory", "give it more memory")
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Connections never get more than three quarters.
        soft = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
        files = max(soft // 4, soft - self._other_files) // SANDBOX_DESCRIPTORS
        yield RoomBound(max(1, files), "open files", "raise the limit of open files (ulimit -n, LimitNOFILE=)")
        pages = (_number("/proc/sys/fs/pipe-user-pages-soft") or cgroups.UNLIMITED) // self._workers
        remedy = "raise the limit of pipes (sysctl fs.pipe-user-pages-soft=262144)"
        pages -= pages // _RESERVE_SHARE
        if self._is_short:
            self._is_short, self._most_by_pipes = False, min(self._most_by_pipes, live - live // _RESERVE_SHARE)
        # One sandbox that takes all pipes does not leave room for itself alone.
        least = pages // 2 // (SANDBOX_PIPE_PAGES + _SERVER_PIPE_PAGES)
        most = min(pages // SANDBOX_PIPE_PAGES, max(least, self._most_by_pipes))
        yield RoomBound(max(1, most), "pipes", remedy)
        for limit, used in _processes():
            free = (limit - limit // _RESERVE_SHARE - used) // self._workers
            remedy = "raise the limit of processes (kernel.pid_max, TasksMax=)"
            yield RoomBound(max(1, live + free // SANDBOX_PROCESSES), "processes", remedy)


def open_more_files() -> None:
    """Raise the limit of this process's open files as far as it may."""
    # What systemd and login shells give, often 1,024, is for programs that use select(2), and a sandbox takes five
    # files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that new processes can have; a very large number if the kernel does not say."""
    left = [bound.limit - bound.used for bound in cgroups.own_bounds(cgroups.MEMORY)]
    return max(0, min(_meminfo("MemAvailable:", meminfo), *left, cgroups.UNLIMITED))


def _total_bytes() -> int:
    limits = [bound.limit for bound in cgroups.own_bounds(cgroups.MEMORY)]
    return min(_meminfo("MemTotal:", Path("/proc/meminfo")), *limits, cgroups.UNLIMITED)


def _meminfo(name: str, meminfo: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return cgroups.UNLIMITED


def _processes() -> Iterator[cgroups.Bounded]:
    with contextlib.suppress(OSError, ValueError):
        # The fourth field is of the running ones and all, with a slash between (proc_loadavg(5)).
        used = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        for name in ("pid_max", "threads-max"):
            yield cgroups.Bounded(_number(f"/proc/sys/kernel/{name}"), used)
    yield from cgroups.own_bounds(cgroups.PIDS)


def _number(path: str) -> int:
    """Return the number in a file of the kernel; a very large one if there is none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return cgroups.UNLIMITED
