"""What a sandbox uses of the machine during a call, as the kernel counts it in the sandbox's control groups."""

# Theory of operation. A group counts all processes that are in it, and no process of a sandbox can leave its groups or
# write to them. So a difference of two readings is what the whole sandbox has used meanwhile, background processes and
# pid 1 included, and those too that were killed or have ended.
#
# 1. CPU time: `cpuacct.usage` in nanoseconds (cgroup-v1/cpuacct.rst), or `usage_usec` of `cpu.stat` (cgroup-v2.rst).
# 2. Memory: the most at one time. The kernel keeps a maximum, which is set back before the call: by version 1 always,
#    by version 2 since Linux 6.12, for this descriptor alone. Where it cannot be set back, it is the call's own only if
#    it has grown during the call.
# 3. Bytes of disks: `io.stat`. Version 1 counts no buffered writes, and many kernels count nothing at all there, so its
#    numbers are not used.

import re

from sandboxes.calls import ResourceUse
from sandboxes.linux.group_files import PEAKS, GroupFiles

_NANOSECONDS, _MICROSECONDS = 1e9, 1e6
_CPU = re.compile(rb"^usage_usec (\d+)$", re.MULTILINE)
_READ, _WRITTEN = re.compile(rb" rbytes=(\d+)"), re.compile(rb" wbytes=(\d+)")


class ResourceMeter:
    """Measures one call after another. Without control groups nothing is known."""

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self._before = ResourceUse()
        self._is_reset = False

    def begin(self) -> None:
        """Begin a call. 10 us with version 1."""
        self._is_reset = any(map(self._files.reset, PEAKS))
        self._before = self._read()

    def end(self) -> ResourceUse | None:
        """Return what the sandbox has used since `begin`; None if nothing is known. 5 us with version 1."""
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
        if (spent := self._files.number("cpuacct.usage")) is not None:
            return spent / _NANOSECONDS
        # The file of this name in version 1 is another one.
        found = _CPU.search(self._files.read("cpu.stat") or b"")
        return None if found is None else int(found[1]) / _MICROSECONDS


def _difference(before: int | None, now: int | None) -> int | None:
    # A disk that was removed takes its numbers along.
    return None if before is None or now is None else max(now - before, 0)
