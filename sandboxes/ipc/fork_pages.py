"""Pages of memory that the forks of one process will write to, and that are made theirs before they are needed."""

# Theory of operation.
#
# A fork shares each page with its parent until one of the two writes to it. The kernel then stops the writer and copies
# the page. Python writes to nearly each page that it uses, because it counts references. So a pid 1 spent 3 ms on 800
# such pages between the order for its sandbox and the first answer.
#
# All forks of one launcher have the same things at the same addresses. So one of them lists the pages of its own when
# it has run a call, and each later one gets these pages while it waits as a spare. The kernel then copies them in one
# go, without a stop for each. A sandbox that has run a call has 6.2 MB of its own instead of 5.5 then, and a spare has
# 6.1 instead of 2.3.
#
# The list comes from a process that is confined like an agent. It names places only. A later pid 1 gets copies of its
# own pages there, with the content that they have, and of `MAX_PAGES` at the most.

import contextlib
import ctypes
import mmap
import struct
from collections.abc import Iterable

from sandboxes.ipc.frames import MalformedFrameError

MAX_PAGES = 4096
"""The most pages that a fork is given ahead. A sandbox that has run a call has some 1,300 of its own."""
_OWN = 1 << 63 | 1 << 56
"""The bits of a page that is in memory, and in that of no other process (pagemap.rst)."""
_NUMBERS = 2
"""The numbers of a run: its first page, and how many they are."""
_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: make pages as a write would make them, and change nothing in them (madvise(2), Linux 5.14)."""


def own_pages() -> list[list[int]]:
    """Return the runs of writable pages that this process shares with no other: of each the first and the number."""
    runs: list[list[int]] = []
    with contextlib.suppress(OSError):
        # A file of /proc that lists needs several reads; pathlib is not loaded in pid 1.
        with open("/proc/self/maps", "rb") as file:  # noqa: PTH123
            lines = file.read().splitlines()
        with open("/proc/self/pagemap", "rb") as file:  # noqa: PTH123
            for line in lines:
                places, rights, *_ = line.split()
                if rights == b"rw-p":
                    first, end = (int(place, 16) // _PAGE for place in places.split(b"-"))
                    file.seek(8 * first)
                    entries = file.read(8 * (end - first))
                    for page, (entry,) in enumerate(struct.iter_unpack("=Q", entries), first):
                        if entry & _OWN == _OWN:
                            _add(runs, page)
    return runs


def _add(runs: list[list[int]], page: int) -> None:
    if runs and sum(runs[-1]) == page:
        runs[-1][1] += 1
    else:
        runs.append([page, 1])


def checked(runs: list[list[int]]) -> list[list[int]]:
    """Return runs that have come from a sandbox; `MalformedFrameError` if they are none, or too many pages."""
    # A page has a number of 52 bits at the most, so none of the sums is larger than an address.
    if any(len(run) != _NUMBERS or not all(0 < number < 1 << 51 for number in run) for run in runs):
        raise MalformedFrameError("these are no runs of pages")
    if sum(count for _, count in runs) > MAX_PAGES:
        raise MalformedFrameError(f"these are more than {MAX_PAGES} pages")
    return runs


def addresses(runs: Iterable[list[int]]) -> list[tuple[int, int]]:
    """Return runs as addresses and bytes."""
    return [(first * _PAGE, count * _PAGE) for first, count in runs]


def write_pages(runs: Iterable[tuple[int, int]]) -> None:
    """Make pages this process's own, given by address and bytes; what cannot be written to is left out."""
    advise = _libc.madvise
    for address, size in runs:
        # An error changes nothing: these pages are made when they are written to.
        advise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))


_libc = ctypes.CDLL(None)
