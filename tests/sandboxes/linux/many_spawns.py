"""Starts programs with the native helper and many descriptors: a program for `test_spawn_memory`.

Its argument is the library. It fails if a program has other descriptors than it was given, or if the library refuses
what it should start. The library may be one that checks each access to memory.
"""

import os
import random
import signal
import sys
from pathlib import Path

from sandboxes.linux.spawn import native_leader
from tests.machine import wait_until

ROUNDS = 60
MOST = 64
"""Descriptors that the library can give to a program."""
HIGHEST = 300
SLEEP = ["/bin/sleep", "600"]


def links(pid: int) -> dict[int, str]:
    """Return what the descriptors of a process are, by number."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(link.name)] = str(link.readlink())
        except FileNotFoundError:
            # The loader has closed it meanwhile.
            continue
    return found


def main() -> None:
    spawn = native_leader(sys.argv[1])
    assert spawn is not None
    choice = random.Random(0)  # noqa: S311 - the same choices in each run
    pipes = [fd for _ in range(20) for fd in os.pipe()]
    # Sources have low and high numbers, so that some are targets of others.
    pipes += [os.dup2(fd, choice.randrange(60, HIGHEST)) for fd in pipes[:10]]
    own = links(os.getpid())
    for count in [1, 2, MOST - 1, MOST, *(choice.randint(1, MOST) for _ in range(ROUNDS))]:
        given = {target: choice.choice(pipes) for target in choice.sample(range(HIGHEST), count)}
        expected = {target: own[source] for target, source in given.items()}
        pid = spawn(SLEEP[0], SLEEP, given)
        try:
            # Until then the loader opens libraries.
            wait_until(lambda pid=pid, expected=expected: links(pid) == expected)  # type: ignore[misc]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for refused in ({}, dict.fromkeys(range(MOST + 1), pipes[0])):
        try:
            spawn(SLEEP[0], SLEEP, refused)
        except OSError:
            continue
        raise AssertionError(f"{len(refused)} descriptors were not refused")
    missing = spawn("/nowhere", ["nowhere"] * 1000, {0: pipes[0]})
    assert os.waitstatus_to_exitcode(os.waitpid(missing, 0)[1]) == 127
    print("all were started")


if __name__ == "__main__":
    main()
