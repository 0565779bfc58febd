"""The files of one sandbox's control groups that its pid 1 reads, opened before it has lost sight of them."""

import contextlib
import os
from collections.abc import Iterable

from sandboxes.linux.descriptors import close_all

PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
"""The files with the most memory at one time, of version 1 and of version 2."""
_READ_ONLY = ("pids.events", "pids.max", "pids.peak", "pids.current", "cpuacct.usage", "cpu.stat", "io.stat")
"""Files of both versions; no machine has all. A limit is never opened for writing: pid 1 serves the agent."""
_MOST_BYTES = 1 << 14
"""How much of a file is read; `io.stat` has some 80 bytes for each disk."""


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
        """Return what a file holds now; None without the file. 2 us."""
        fd = self._fds.get(name)
        return None if fd is None else os.pread(fd, _MOST_BYTES, 0)

    def number(self, name: str) -> int | None:
        """Return the last number in a file; None without the file, or if it says "max"."""
        text = self.read(name)
        last = text.split()[-1] if text else b""
        return int(last) if last.isdigit() else None

    def reset(self, name: str) -> bool:
        """Have a file that holds a maximum begin anew; return whether the kernel does that."""
        try:
            # Version 1 takes no other number (cgroup-v1/memory.rst), and version 2 takes any text (cgroup-v2.rst).
            return name in self._fds and os.pwrite(self._fds[name], b"0", 0) > 0
        except OSError:
            return False
