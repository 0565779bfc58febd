"""What the kernel counts for each user, and so for all sandboxes of that user together.

A sandbox can take all inotify instances of the machine's user, all descriptors in sockets, or all memory of pipes, and
no limit is for a part of a user's processes. So each supervisor checks now and then, and after each call, whether
anything is left. If nothing is, the call's answer is its rollout's own, and the supervisor counts what its sandbox
holds: a large part ends it.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterable

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, close_all

SHARE = 48
"""How many inotify instances, descriptors under way and pieces of pipes one sandbox may hold where the machine has none
left. Programs have one to five; the kernel's defaults for all of a user are 128 instances, a soft limit of 1,024
descriptors, and 16,384 pages in pipes."""
_PIECE = 64 * os.sysconf("SC_PAGESIZE")
"""The bytes of pipes that count as one. A new pipe has a quarter of it."""
_PIPE_BYTES = 16 * os.sysconf("SC_PAGESIZE")
"""The capacity of a new pipe (pipe(7)), while its user may have pages."""

WATCH_S = 0.05
"""The shortest interval between two checks; a check takes 20 us."""


def are_exhausted() -> bool:
    """Return whether this user can have no further inotify instance, whole pipe, or descriptor under way."""
    # The kernel exempts root with its rights from the limit of pipes, and pid 1 has given these up.
    try:
        os.close(kernel.inotify())
        pipe = os.pipe()
        capacity = fcntl.fcntl(pipe[0], fcntl.F_GETPIPE_SZ)
        close_all(pipe)
        if capacity < _PIPE_BYTES:
            return True
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(ours, [b"x"], [ours.fileno()])
    except OSError as error:
        return error.errno in {errno.EMFILE, errno.ETOOMANYREFS}
    return False


def held(pids: Iterable[int]) -> float:
    """Return how much of what `SHARE` bounds some processes hold; one that hides its descriptors has too many."""
    count, pipes = 0.0, dict[str, float]()
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - pathlib is not loaded in pid 1
                link = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                count += link == "anon_inode:inotify"
                if link.startswith("socket:"):
                    count += under_way(f"/proc/{pid}/fdinfo/{name}")
                elif link.startswith("pipe:") and link not in pipes:
                    pipes[link] = _capacity(f"/proc/{pid}/fd/{name}") / _PIECE
        except PermissionError:
            count += SHARE + 1
        except OSError:
            # The process or the descriptor is gone.
            continue
    return count + sum(pipes.values())


def _capacity(path: str) -> int:
    with Opened(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as end:
        return fcntl.fcntl(end, fcntl.F_GETPIPE_SZ)


def under_way(path: str) -> int:
    """Return how many descriptors wait in a socket to be received, by its file in /proc (proc_pid_fdinfo(5))."""
    with open(path) as file:  # noqa: PTH123
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
