"""Who lives in this pid namespace, seen from its pid 1."""

import os
import signal
import time
from collections.abc import Callable, Iterable

Process = tuple[int, int]
"""A pid and its start time in ticks: together they name one process, also after its pid is used again."""

GRACE_S = 0.03
"""How long what a command left is given to end: the right side of `> >(tee log)` outlives its command by moments."""
PAUSES_S = (0.001, 0.002, 0.004, 0.008, 0.015)
"""Between looks; the last one again and again."""
_LONGEST_S = 1.0
_REST_S = 5.0
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
_LOOKS = 5
_PAGE = 1 << 16


def living() -> set[Process]:
    """Return all living processes but pid 1, zombies not counted; 0.05 ms and 0.02 ms a process."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is not loaded in pid 1
        if name.isdigit() and name != "1" and (started := _start_time(name)) is not None:
            found.add((int(name), started))
    return found


def _read(path: str) -> bytes:
    """Return what a file of the kernel's says. 5 us; a file object asks for more than twice as much."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, _PAGE), b""))
    finally:
        os.close(fd)


def _start_time(pid: str) -> int | None:
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


class Grace:
    """The time that those are given to end who live after a command, begun when they are first seen.

    Who is about to end needs a CPU for that. So for who wants one its own time counts, not what it waits on a busy
    machine; for who sleeps, all time does.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._seen: dict[Process, tuple[float, float]] = {}

    def over(self, left: Iterable[Process]) -> bool:
        """Say whether one of these has had its time and lives on, or all together had too much."""
        now = time.monotonic()
        # All of them: the time of each begins with its first look.
        had = [process for process in left if self._had(process, now)]
        return bool(had) or now - self._begun > _LONGEST_S

    def _had(self, process: Process, now: float) -> bool:
        busy, used_s = _demand(process[0])
        seen, used_before_s = self._seen.setdefault(process, (now, used_s))
        return (used_s - used_before_s if busy else now - seen) >= GRACE_S


def _demand(pid: int) -> tuple[bool, float]:
    """Return whether a process wants a CPU, and for how long it has had one; one that is gone wants none."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return False, 0.0
    return fields[0] in {b"R", b"D"}, (int(fields[11]) + int(fields[12])) * _TICKS_S


def rests(pid: int, as_new: Callable[[], bool]) -> bool:
    """Wait until a process sleeps, or as_new holds of it; return whether that does.

    What sleeps stays as it is. One that does not, waits for a CPU: on a busy machine that takes its time.
    """
    deadline, pause_s = time.monotonic() + _REST_S, 0.0002
    while True:
        # Before the look: it may fall asleep after it.
        asleep = not _demand(pid)[0]
        if as_new():
            return True
        if asleep or time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.004)


def turns(processes: Iterable[Process]) -> dict[Process, int]:
    """Return how often each one's threads have had a CPU so far; -1 for one that is running, or just about to.

    A process whose count stands still has done nothing, so its memory is what it was: 0.03 ms a thread.
    """
    found = {}
    for process in processes:
        count = 0
        try:
            for thread in os.listdir(f"/proc/{process[0]}/task"):  # noqa: PTH208
                place = f"/proc/{process[0]}/task/{thread}"
                state = _read(f"{place}/stat").rpartition(b")")[2].split()[0]
                taken = int(_read(f"{place}/schedstat").split()[2])
                count = -1 if state in {b"R", b"D"} or count < 0 else count + taken
        except OSError:
            # It ended, which others notice; or this kernel does not count turns: then nobody knows.
            count = -1
        found[process] = count
    return found


def worked(before: dict[Process, int], after: dict[Process, int]) -> bool:
    """Whether any that lived before and after may have changed its memory in between."""
    return any(after[process] < 0 or after[process] != before[process] for process in before.keys() & after)


def reap() -> dict[int, int]:
    """Collect the children that ended; return pid -> exit status as a shell tells it (128 + signal)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def kill_except(spared: set[Process], first: int | None = None) -> dict[int, int]:
    """Kill all but pid 1 and spared, however fast they fork; return what was reaped.

    first goes before the others: a shell, which would report the death of its children.
    """
    ended: dict[int, int] = {}
    if first is not None:
        _kill(first)
    deadline = time.monotonic() + 10
    while True:
        doomed = living() - spared
        ended |= reap()
        if not doomed or time.monotonic() > deadline:
            return ended
        if spared:
            # All stand still first: a shell whose child is killed before it would go on with its next command.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid, _ in doomed:
                    _kill(pid, number)
        else:
            # One call for all: nobody can fork past it.
            _kill(-1)
        time.sleep(0.0003)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def written_paths() -> set[str]:
    """Return the paths, relative to the root, of the files that a living process has open for writing."""
    found = set()
    for pid, _ in living():
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                with open(f"/proc/{pid}/fdinfo/{name}") as file:  # noqa: PTH123
                    flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.add(os.readlink(f"/proc/{pid}/fd/{name}").lstrip("/"))  # noqa: PTH115
        except (OSError, StopIteration):
            # It ended meanwhile.
            continue
    return found


def descend(listed: Callable[[], Iterable[int]], root: int) -> bool:
    """Whether each of the pids that listed returns, all parents up to root among them, descends from root, or is root.

    One that ends while it is looked at seems to have lost its parent, so nobody is found guilty at first sight.
    """
    for _ in range(_LOOKS):
        parents = {pid: _parent(pid) for pid in listed()}
        if all(_descends(pid, root, parents) for pid in parents):
            return True
    return False


def _parent(pid: int) -> int:
    try:
        return int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def last_pid() -> int:
    """Return the pid that was given away last in this pid namespace."""
    return int(_read("/proc/sys/kernel/ns_last_pid"))


def ipc_objects() -> int:
    """Return how many System V segments, semaphores and queues there are: state that no file holds."""
    count = 0
    for kind in ("shm", "sem", "msg"):
        try:
            count += _read(f"/proc/sysvipc/{kind}").count(b"\n") - 1
        except OSError:
            continue
    return count


def descriptors(pid: int) -> dict[int, str] | None:
    """Return what pid has open; None where it is gone or does not let us look."""
    try:
        return {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH115, PTH208
    except OSError:
        return None
