"""The parts of a process's private memory: by kind of mapping first, then by owner. For `bench.soak`.

The kernel reports the resident private pages of each mapping. Both allocators report how much of them is allocated:
Python's, which serves objects of at most 512 bytes from arenas of 1 MiB, and libc's. The rest is free memory that an
allocator keeps, so the sizes that `parts` returns add up to the private memory. If tracemalloc is on, allocated memory
is divided by the source files that allocated it.
"""

import ctypes
import mmap
import os
import re
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.memory import part_of

SQLITE = "SQLite"
SMALL = "Python's objects of at most 512 bytes"
LIBRARIES = "C libraries, and objects older than the tracing"
LARGE = "larger objects of Python, and C libraries"
TRACER = "tracemalloc itself, which only this bench uses"
PYTHON_FREE = "free: kept by Python's allocator"
LIBC_FREE = "free: kept by libc's allocator"
STACKS = "stacks of threads"
DATA = "variables of programs and libraries"
UNKNOWN = "mappings of no known owner"
_ARENA = 1 << 20
"""Bytes of an arena of Python's allocator (`ARENA_SIZE` in CPython's `obmalloc.c`)."""
_THREAD_HEAP = 64 << 20
"""The alignment of the heaps that libc makes for threads (`HEAP_MAX_SIZE` in glibc's `arena.c`)."""
_TRACE_BYTES = 80
"""libc's memory for one trace: an entry of a hash table, 48 bytes, and a trace, 32 (CPython's `_tracemalloc.c`)."""
_TRACE_COUNTED = 32
"""What `tracemalloc.get_tracemalloc_memory` counts of it: the entry without libc's share, and no trace."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping of a process.

    Attributes:
        start: Its first address.
        end: The address after its last.
        rights: For example `rw-p`.
        name: Its file, a name of the kernel's such as `[heap]`, or nothing.
        private_bytes: Resident bytes that are no pages of a file.
    """

    start: int
    end: int
    rights: str
    name: str
    private_bytes: int = 0


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc: sums over the heaps of all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def mappings(smaps: str) -> Iterator[Mapping]:
    """Parse `/proc/PID/smaps` (pure)."""
    heads = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)$", re.MULTILINE)
    found = [*heads.finditer(smaps), None]
    for head, following in pairwise(found):
        assert head is not None
        body = smaps[head.end() : following.start() if following else None]
        private = re.search(r"^Anonymous: +(\d+) kB$", body, re.MULTILINE)
        assert private is not None
        yield Mapping(int(head[1], 16), int(head[2], 16), head[3], head[4], int(private[1]) << 10)


def by_kind(mapped: list[Mapping]) -> tuple[Counter[str], Counter[str]]:
    """Return the private bytes and the whole bytes of the mappings of each kind (pure).

    The kinds are `heap`, `thread heap`, `stack`, `data` (changed pages of files), and `other`. In `other` are Python's
    arenas, what libc maps beside its heaps, and variables of libraries that begin as zeros.
    """
    private: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    around = [None, *mapped, None]
    for before, mapping, after in zip(around, mapped, around[2:], strict=False):
        # libc puts a page without rights below each stack.
        guard = mapping.start - mmap.PAGESIZE
        guarded = (
            before is not None
            and before.rights.startswith("---")
            and (before.start, before.end) == (guard, mapping.start)
        )
        reserved = after is not None and after.rights.startswith("---") and after.start == mapping.end
        if mapping.name == "[heap]":
            kind = "heap"
        elif mapping.name.startswith("[stack") or (not mapping.name and guarded):
            kind = "stack"
        elif mapping.name.startswith(("/", "[v")):
            kind = "data"
        elif reserved and mapping.start % _THREAD_HEAP == 0:
            kind = "thread heap"
        else:
            kind = "other"
        private[kind] += mapping.private_bytes
        whole[kind] += mapping.end - mapping.start if mapping.rights.startswith("rw") else 0
    return private, whole


def parts(pid: int) -> dict[str, int]:
    """Return the bytes of each part of a process's private memory. They add up to all of it.

    Call it in a forked child of the process, so that its own memory does not count.

    Args:
        pid: The process, which has just forked this one.
    """
    libc = _libc()
    small, arenas = _python()
    private, whole = by_kind(list(mappings(Path(f"/proc/{pid}/smaps").read_text())))
    allocated = libc.uordblks + libc.hblkhd
    # What libc has beside its heaps: large blocks, and pieces of its first heap where no more room was behind it.
    mapped = libc.hblkhd + max(0, libc.arena - whole["heap"] - whole["thread heap"])
    unknown = max(0, whole["other"] - arenas * _ARENA - mapped)
    sizes = _by_owner(small, allocated)
    sizes[LIBC_FREE] = private["heap"] + private["thread heap"] + mapped - allocated
    sizes[PYTHON_FREE] = private["other"] - mapped - unknown - small
    return {**sizes, STACKS: private["stack"], DATA: private["data"], UNKNOWN: unknown}


def _by_owner(small: int, large: int) -> dict[str, int]:
    """Return the owners of allocated memory: `small` bytes of Python's allocator, and `large` bytes of libc's."""
    sqlite = _sqlite()
    if not tracemalloc.is_tracing():
        return {SMALL: small, SQLITE: sqlite, LARGE: large - sqlite}
    tracer = tracemalloc.get_tracemalloc_memory()
    owned: Counter[str] = Counter()
    traces = tracemalloc.take_snapshot().traces
    for trace in traces:
        # Python's allocator rounds up to multiples of 16 bytes. libc adds 8 bytes to each block.
        size = (trace.size + (15 if trace.size <= 512 else 23)) & ~15
        owned[part_of(trace.traceback[0].filename)] += size
    tracer += len(traces) * (_TRACE_BYTES - _TRACE_COUNTED)
    return {**owned, SQLITE: sqlite, TRACER: tracer, LIBRARIES: small + large - owned.total() - sqlite - tracer}


def _libc() -> _Mallinfo2:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    sums: _Mallinfo2 = mallinfo2()
    return sums


def _python() -> tuple[int, int]:
    """Return the bytes that Python's allocator has allocated, and the number of its arenas."""
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if not child:
            # While allocations are traced, CPython prints nothing about its allocator.
            tracemalloc.stop()
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()  # noqa: SLF001 - no public function returns this
            os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        statistics = dict(re.findall(r"^# (.+?) += +([\d,]+)$", file.read(), re.MULTILINE))
    names = ("bytes in allocated blocks", "arenas allocated current")
    allocated, arenas = (int(statistics[name].replace(",", "")) for name in names)
    return allocated, arenas


def _sqlite() -> int:
    """Return the bytes that SQLite has allocated; 0 if it is not loaded."""
    path = re.search(r"/\S*libsqlite3\S*", Path("/proc/self/maps").read_text())
    if path is None:
        return 0
    used = ctypes.CDLL(path[0]).sqlite3_memory_used
    used.restype = ctypes.c_int64
    return int(used())
