"""The processes of this pid namespace, as its pid 1 sees them.

Theory of operation. The kernel offers no snapshot of all processes, so everything here reads /proc, and any process may
end or fork between two reads. Three rules keep the answers right:

1. A process is named by its pid and its start time, because pids are used again.
2. A process whose files are gone has ended, and counts as not there. Any other error is one of this process: a
   command may have lowered the descriptors of pid 1 (`prlimit`), and a process must not hide behind that.
3. To kill many, they are stopped first, then killed, and the list is read again until it is empty.

Files of /proc are read with `os.read`, which takes 5 microseconds; a file object takes more than twice as long, and
pathlib is not loaded in pid 1.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from sandboxes.linux.descriptors import Opened

Process = tuple[int, int]
"""A pid and its start time in clock ticks. Together they name one process, even after its pid is used again."""

LAST_PID = "kernel/ns_last_pid"
"""The setting of the kernel that says which pid was assigned last, in the pid namespace of who reads it."""
GRACE_S = 0.03
"""How long a process that outlives its command may take to end before it counts as a background process. The right side
of `> >(tee log)` outlives its command by moments. Each command that does leave a background process waits this long.
Halved, busy machines see background processes where there are none, and such states cannot be frozen."""
PAUSES_S = (0.001, 0.002, 0.004, 0.008, 0.015)
"""The pauses between two looks at such a process. After the last one, it repeats."""
_MAX_GRACE_S = 1.0
"""Longest grace for all processes of a command together, however busy the machine is."""
_MAX_ASLEEP_WAIT_S = 5.0
"""Longest wait for a process that does not fall asleep."""
_MAX_KILL_S = 10.0
"""Longest time to kill all. A process that does not die in that time is stuck in the kernel."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MAX_LOOKS = 5
"""How often a family tree is read before a process counts as a stranger."""
_PAGE = 1 << 16
# Fields of /proc/PID/stat after the command name, which is in parentheses (proc_pid_stat(5)).
_STATE, _PARENT, _FLAGS, _USER_TIME, _SYSTEM_TIME, _THREADS, _START_TIME = 0, 1, 6, 11, 12, 17, 19
_BUSY = frozenset({b"R", b"D"})
"""The states of a process that wants a CPU or waits for a disk."""
_EXITING = 0x4 | 0x400
"""Flags of a process that ends: PF_EXITING, PF_SIGNALED (include/linux/sched.h)."""


def list_processes(ours: Collection[int] = ()) -> set[Process]:
    """Return all processes but pid 1 and some others; zombies do not count."""
    return set(fields_of_processes(ours))


def fields_of_processes(ours: Collection[int] = ()) -> dict[Process, list[bytes]]:
    """Return the fields (`stat_fields`) of all processes but pid 1 and some others; see `list_processes`."""
    processes = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is not loaded in pid 1
        if name.isdigit() and name != "1" and int(name) not in ours:
            fields = stat_fields(name)
            if fields is not None and not has_ended(fields):
                processes[int(name), int(fields[_START_TIME])] = fields
    return processes


def has_ended(fields: list[bytes]) -> bool:
    """Return whether a process has ended, by its fields of /proc/PID/stat after the command name (pure)."""
    # A process whose first thread has ended looks like a zombie, but its other threads run on.
    return fields[_STATE] in {b"Z", b"X"} and int(fields[_THREADS]) <= 1


def shown(path: str) -> bytes:
    """Return what a file of /proc shows that is no list: the kernel gives it whole to one read (seq_file.rst)."""
    with Opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return os.read(fd, _PAGE)


def stat_fields(process: int | str) -> list[bytes] | None:
    """Return the `stat` fields, from the third on, of PID or PID/task/TID; None if it has ended (proc_pid_stat(5))."""
    try:
        return shown(f"/proc/{process}/stat").rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


class Grace:
    """The time that processes get to end after their command."""

    # A process that is about to end needs a CPU for that. While it wants one, only its own CPU time counts, because a
    # busy machine may not give it any. While it sleeps, all time counts.

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._first_seen: dict[Process, tuple[float, float]] = {}

    @property
    def is_over(self) -> bool:
        """Whether all processes together took too long."""
        return time.monotonic() - self._began_at > _MAX_GRACE_S

    def expired(self, processes: Iterable[Process]) -> bool:
        """Return whether one of these processes has used up its grace, or all together took too long."""
        now = time.monotonic()
        # A list, not a generator: the grace of each process begins with its first look.
        expired = [process for process in processes if self._has_used_up(process, now)]
        return bool(expired) or self.is_over

    def _has_used_up(self, process: Process, now: float) -> bool:
        busy, cpu_s = _cpu_demand(process[0])
        seen_at, cpu_before_s = self._first_seen.setdefault(process, (now, cpu_s))
        return (cpu_s - cpu_before_s if busy else now - seen_at) >= GRACE_S


def _cpu_demand(pid: int) -> tuple[bool, float]:
    fields = stat_fields(pid)
    if fields is None:
        return False, 0.0
    ticks = int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
    return is_busy(fields), ticks * _TICK_S


def is_busy(fields: list[bytes]) -> bool:
    """Return whether a process wants a CPU or waits for a disk, by its `stat_fields` (pure)."""
    return fields[_STATE] in _BUSY


def is_ending(pid: int, fields: list[bytes]) -> bool:
    """Return whether a process ends, or has yet to take a signal that ends or stops it: that needs a CPU."""
    # A signal that ends a process wakes all its threads, so most are known by their first one: it sleeps.
    if not _is_ending(str(pid), fields):
        return False
    try:
        threads = [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
        return all(_is_ending(thread, stat_fields(thread)) for thread in threads)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_ending(thread: str, fields: list[bytes] | None) -> bool:
    if fields is None or int(fields[_FLAGS]) & _EXITING:
        return True
    if not is_busy(fields):
        return False
    try:
        status = dict(line.split(b":", 1) for line in shown(f"/proc/{thread}/status").splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return True
    own, shared, blocked, caught = (int(status[name], 16) for name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt"))
    # The kernel queues no signal that is ignored, but a blocked one (signal(7)).
    return bool((own | shared) & ~blocked & ~caught)


def wait_until_asleep(pid: int, as_new: Callable[[], bool]) -> bool:
    """Wait until a process sleeps, or until a condition holds; return whether the condition holds."""
    # A sleeping process stays as it is, so its condition will not change either.
    deadline, pause_s = time.monotonic() + _MAX_ASLEEP_WAIT_S, 0.0002
    while not as_new():
        # Before the condition: the process may change and then fall asleep between the two looks.
        asleep = not _cpu_demand(pid)[0]
        if asleep or time.monotonic() > deadline:
            return as_new()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.004)
    return True


def run_counts(processes: Iterable[Process]) -> dict[Process, int]:
    """Return how often the threads of each process were given a CPU; -1 for one that runs or is not counted."""
    # A process whose count did not change has not run, so its memory is unchanged.
    counts = {}
    for process in processes:
        count = 0
        try:
            for thread in os.listdir(f"/proc/{process[0]}/task"):  # noqa: PTH208 - pathlib is not loaded in pid 1
                directory = f"/proc/{process[0]}/task/{thread}"
                state = shown(f"{directory}/stat").rpartition(b")")[2].split()[_STATE]
                runs = int(shown(f"{directory}/schedstat").split()[2])
                count = -1 if state in _BUSY or count < 0 else count + runs
        except OSError:
            # The process ended, which other checks notice, or this kernel has no schedstat.
            count = -1
        counts[process] = count
    return counts


def ran_between(before: dict[Process, int], after: dict[Process, int]) -> bool:
    """Return whether a process that existed at both times may have run, and so changed its memory, in between."""
    return any(after[process] < 0 or after[process] != before[process] for process in before.keys() & after)


def limits(pid: int) -> bytes:
    """Return the resource limits of a process as the kernel shows them (proc_pid_limits(5)); empty if it has ended."""
    try:
        return shown(f"/proc/{pid}/limits")
    except OSError:
        return b""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, or traced (proc_pid_stat(5))."""
    fields = stat_fields(pid)
    return fields is not None and fields[_STATE] in {b"T", b"t"}


def reap() -> dict[int, int]:
    """Collect the children that have ended; return their exit codes by pid, 128 + number for a signal."""
    exit_codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_codes
        if pid == 0:
            return exit_codes
        code = os.waitstatus_to_exitcode(status)
        exit_codes[pid] = code if code >= 0 else 128 - code


def kill_except(spared: AbstractSet[Process], first: int | None = None) -> dict[int, int]:
    """Kill all processes but pid 1 and the spared ones, however fast they fork; return children's exit codes."""
    # The first one is killed before the others: a shell, which would report the death of its children.
    exit_codes: dict[int, int] = {}
    if first is not None:
        _kill(first)
    deadline = time.monotonic() + _MAX_KILL_S
    while True:
        doomed = list_processes() - spared
        exit_codes |= reap()
        if not doomed or time.monotonic() > deadline:
            return exit_codes
        if spared:
            # All are stopped first: a shell whose child is killed before it would run its next command.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid, _ in doomed:
                    _kill(pid, number)
        else:
            # One call kills all processes of the namespace, so none can fork in between.
            _kill(-1)
        time.sleep(0.0003)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def written_paths() -> set[str]:
    """Return the paths, without their first /, of the files that processes but pid 1 may write to."""
    paths = set()
    for pid, _ in list_processes():
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - pathlib is not loaded in pid 1
                with open(f"/proc/{pid}/fdinfo/{name}") as file:  # noqa: PTH123
                    flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    paths.add(os.readlink(f"/proc/{pid}/fd/{name}").lstrip("/"))  # noqa: PTH115
        except (OSError, StopIteration):
            # The process ended between two reads.
            continue
    return paths


def all_descend(list_pids: Callable[[], Iterable[int]], root: int) -> bool:
    """Return whether all processes of a list are the process `root` or descend from it."""
    # A process whose parent ends between two reads seems to have no parent. So the list, which has every ancestor up to
    # `root`, is read again before a process counts as a stranger.
    for _ in range(_MAX_LOOKS):
        parents = {pid: parent(pid) for pid in list_pids()}
        if all(_descends(pid, root, parents) for pid in parents):
            return True
    return False


def parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 if there is no such process."""
    fields = stat_fields(pid)
    return 0 if fields is None else int(fields[_PARENT])


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def last_pid() -> int:
    """Return the pid that was assigned last in this pid namespace."""
    return int(shown(f"/proc/sys/{LAST_PID}"))


def set_last_pid(file: int, number: int) -> None:
    """Make the next process of this process's pid namespace get the pid after a number."""
    # A process outside the sandbox has opened the file. The kernel goes by the namespace of the writer
    # (pid_namespaces(7)).
    os.pwrite(file, str(number).encode(), 0)


def death_of(pid: int) -> int:
    """Return a descriptor that is readable once a process has ended; at once if it has, and for 0, which is none."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            return os.pidfd_open(pid)
    return os.eventfd(1, os.EFD_CLOEXEC)


def ipc_objects(*kinds: str) -> int:
    """Return how many System V objects of some kinds (`shm`, `sem`, `msg`) exist: state that no file holds."""
    count = 0
    for kind in kinds:
        try:
            # The first line is a heading.
            count += shown(f"/proc/sysvipc/{kind}").count(b"\n") - 1
        except FileNotFoundError:
            continue
    return count


def has_descriptors(pid: int, expected: Mapping[int, str]) -> bool:
    """Return whether exactly these descriptors of a process are open, by the kernel's names of what they lead to."""
    try:
        folder = f"/proc/{pid}/fd"
        # The size of the directory is the number of descriptors since Linux 6.2 (proc_pid_fd(5)); before, it is 0.
        number = os.stat(folder).st_size or len(os.listdir(folder))  # noqa: PTH116, PTH208
        return number == len(expected) and all(
            os.readlink(f"/proc/{pid}/fd/{fd}") == name  # noqa: PTH115
            for fd, name in expected.items()
        )
    except OSError:
        return False


def pid_of(process: int) -> int:
    """Return the number of the process that a process descriptor names; -1 for any other descriptor."""
    with open(f"/proc/self/fdinfo/{process}") as lines:  # noqa: PTH123
        return next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), -1)
