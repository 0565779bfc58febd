"""Pages that a fork gets before it writes to them."""

import ctypes
import json
import mmap
import os
import resource
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from sandboxes.ipc.fork_pages import MAX_PAGES, addresses, checked, own_pages, write_pages
from sandboxes.ipc.frames import MalformedFrameError

PAGES = 64


def in_fork(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a fork of this process, as JSON carries it."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the last frame of a process
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(text)


def shared_memory() -> tuple[mmap.mmap, int]:
    """Return memory that forks share with this process until one of them writes to it, and its first page."""
    memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A huge page would be copied as a whole.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = bytes(range(PAGES)) * mmap.PAGESIZE
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)) // mmap.PAGESIZE


def own_among(first: int) -> list[int]:
    """Return which pages of `shared_memory` are this process's own, by their place in it."""
    owned = {page for begin, count in own_pages() for page in range(begin, begin + count)}
    return sorted(page - first for page in owned if first <= page < first + PAGES)


def test_a_page_becomes_a_forks_own_when_it_is_written_to() -> None:
    memory, first = shared_memory()

    def work() -> list[list[int]]:
        before = own_among(first)
        memory[3 * mmap.PAGESIZE] = 1
        memory[9 * mmap.PAGESIZE] = 1
        return [before, own_among(first)]

    assert in_fork(work) == [[], [3, 9]]


def test_pages_that_a_fork_was_given_cost_no_fault_and_keep_their_content() -> None:
    memory, first = shared_memory()
    content = memory[:]

    def faults_of(prepared: list[tuple[int, int]]) -> Callable[[], list[int]]:
        def work() -> list[int]:
            write_pages(prepared)
            same = memory[:] == content
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for page in range(PAGES):
                memory[page * mmap.PAGESIZE] = 255
            return [int(same), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]

        return work

    same, taken = in_fork(faults_of([]))
    assert same
    assert taken >= PAGES
    same, taken = in_fork(faults_of(addresses([[first, PAGES]])))
    assert same
    assert taken < PAGES // 2
    assert memory[:] == content


def test_pages_that_are_not_there_are_left_out() -> None:
    memory, first = shared_memory()

    def work() -> list[int]:
        # Page 1 is never mapped (mmap_min_addr), and what this process may not write to is not made writable.
        code = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
        assert code is not None
        write_pages(addresses([[1, 1], [code // mmap.PAGESIZE, 1], [first + 5, 1]]))
        return own_among(first)

    assert in_fork(work) == [5]
    memory.flush()


@pytest.mark.parametrize(
    "runs",
    [[[1]], [[1, 2, 3]], [[0, 1]], [[1, 0]], [[-5, 1]], [[1 << 51, 1]], [[1, 1 << 51]], [[7, MAX_PAGES], [9999, 1]]],
)
def test_runs_of_a_sandbox_are_checked(runs: list[list[int]]) -> None:
    with pytest.raises(MalformedFrameError):
        checked(runs)


def test_good_runs_pass() -> None:
    runs = [[7, MAX_PAGES - 1], [9999, 1]]
    assert checked(runs) == runs
