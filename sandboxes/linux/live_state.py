"""What a call can change of processes that do not run meanwhile."""

# Theory of operation.
#
# A process that gets CPU time during a call may have changed anything of its own, and counts as changed
# (`processes.run_counts`). A process that sleeps can still be changed by others. There are five doors to it, and each
# is watched from before the call until after it:
#
# 1. System calls that name a process: signals, scheduling, resource limits, tracing. What they set is read from
#    /proc/PID/status, /proc/PID/limits, sched_getattr(2) and ioprio_get(2). A tracer stops its process, which takes
#    CPU time. The filter of a sandbox refuses process_vm_writev(2), which leaves no trace.
# 2. Files of /proc/PID: memory (`mem`), `oom_score_adj`, `timerslack_ns` and some twenty more, each of which can be
#    written. Their values are not read. The kernel reports any write to a file of these directories (F_NOTIFY,
#    fcntl(2)).
# 3. Objects that a path leads to, often /proc/PID/fd/N: FIFOs, pipes, terminals, memfds. Their fill and settings are
#    read by a descriptor that takes nothing out. Regular files belong to the file system, which others compare.
# 4. Sockets, by their addresses: see `socket_queues`.
# 5. Queues of inotify and fanotify, which nothing shows. An event wakes the process that waits for it, and that takes
#    CPU time. A process that holds such a queue and does not wait makes the state *opaque*.
#
# What else is opaque: a process that cannot be read; real-time signals, of which only one is seen however many wait; a
# FIFO without a reader, which cannot be opened unnoticed; memfds above a size; the master end of a terminal, whose
# queue nothing shows, and whose reader the kernel wakes a moment after a write (`flush_to_ldisc` in
# drivers/tty/tty_buffer.c), so after the end of the call. Beside an opaque state every call counts as a change.
#
# Objects of the supervisor itself (the pipes of its background processes) are left out. It drains them all the time.

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import termios
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, close_all, unread_bytes
from sandboxes.linux.processes import Process, shown
from sandboxes.linux.socket_queues import SocketQueues, lingering_connections

_DN_MODIFY = 0x2
"""Reports writes to the files of a directory, once (F_NOTIFY, fcntl(2))."""
_FIRST_REAL_TIME = 31
"""The bit of the lowest real-time signal in a mask of signals (signal(7))."""
_NUMBERS = {
    # sched_getattr, ioprio_get, and the calls that wait for descriptors: read, poll, select, pselect6, ppoll,
    # epoll_wait, epoll_pwait, epoll_pwait2.
    "x86_64": (315, 252, {0, 7, 23, 270, 271, 232, 281, 441}),
    "aarch64": (275, 31, {63, 72, 73, 22, 441}),
}
_SCHED_ATTRIBUTE_BYTES = 56
"""The size of the second version of `struct sched_attr` (sched_setattr(2)); the kernel fills less if it knows less."""
_F_GET_SEALS, _TIOCGEXCL = 1034, 0x80045440
_MAX_MEMORY_BYTES = 1 << 20
"""The largest memfd whose content is compared, 0.3 ms. A mapping may be written without any other trace."""
_PAGE = 1 << 16
TERMINALS = range(136, 144)
"""The major numbers of the slave ends of terminals (devices.txt of Linux)."""
MASTER = os.makedev(5, 2)
"""The device /dev/ptmx, whose descriptors are the master ends of terminals."""
_MEMORY_FILES = ("/memfd:", "/dev/zero", "/SYSV")
_LINGERING = ("lingering",)
_OPEN_TO_ALL = ("/dev/pts/ptmx", "/dev/pts", "/dev/mqueue", "/proc")
"""Directories and a file that are in no layer, and whose owner and mode a command may change."""
_EVENT_QUEUES = ("anon_inode:inotify", "anon_inode:[fanotify]")


class _OpaqueError(Exception):
    """Something of a process cannot be shown."""


class LiveState:
    """What calls can change of processes that sleep, from one look to the next."""

    def __init__(
        self,
        runs: Mapping[Process, int],
        shells: Collection[int],
        sockets: SocketQueues | None,
        *,
        hidden: Collection[int] = (),
    ) -> None:
        """Take the first look. Nothing in the sandbox sees descriptors of `hidden`; no `sockets` if unsupported."""
        self._hidden = frozenset(hidden)
        # Whose state it is: how often each process was given a CPU, and the idle shells. A look is of use while these
        # stay the same.
        self.subjects = (runs, frozenset(shells))
        self._pids, self._shells, self._sockets = [pid for pid, _ in runs], frozenset(shells), sockets
        forget_writes()
        self._watches: list[int] = []
        self._before: dict[Any, Any] | None = None
        # A process that has ended, or that cannot be shown, leaves None: then `changed` is True.
        with contextlib.suppress(OSError, _OpaqueError):
            for pid in (*self._pids, *self._shells):
                self._watches += report_writes(pid)
            self._before = self._read()

    def changed(self) -> bool:
        """Return whether a call has changed something since the last look; True if that cannot be shown."""
        before, self._before = self._before, None
        try:
            after = self._read()
        except (OSError, _OpaqueError):
            return True
        # The kernel reports the first write only. So this was the last look.
        if before is None or was_written():
            return True
        self._before = after
        # Closed connections are forgotten after a minute, which is no change of the call's.
        if after.get(_LINGERING, 0) > before.get(_LINGERING, 0):
            return True
        return any(before[name] != after[name] for name in before.keys() & after.keys() if name != _LINGERING)

    @property
    def spent(self) -> bool:
        """Whether the next look would show nothing."""
        return self._before is None

    def close(self) -> None:
        """End the watch."""
        close_all(self._watches)
        self._watches.clear()

    def _read(self) -> dict[Any, Any]:
        facts: dict[Any, Any] = {}
        objects = _Objects()
        for pid in (*self._pids, *self._shells):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                facts["limits", pid] = shown(f"/proc/{pid}/limits")
                for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib is not loaded in pid 1
                    facts["thread", pid, thread] = _thread(f"/proc/{pid}/task/{thread}", int(thread))
                if pid in self._hidden:
                    continue
                if pid in self._shells:
                    # A shell shares these descriptions with what it has started.
                    for number in range(3):
                        facts["shell", pid, number] = shown(f"/proc/{pid}/fdinfo/{number}")
                else:
                    objects.look(pid)
        facts |= objects.facts()
        if objects.sockets:
            if self._sockets is None:
                raise _OpaqueError("sockets")
            facts |= self._sockets.read()
            facts[_LINGERING] = lingering_connections()
        return facts


def report_writes(pid: int) -> list[int]:
    """Have the kernel report the next write to a file of a process or its threads, to `was_written`."""
    # Closing the descriptors ends the watch. `OSError` says that the process has ended.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
    paths = [f"/proc/{pid}"]
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib is not loaded in pid 1
        paths.append(f"/proc/{pid}/task/{thread}")
        if thread != str(pid):
            # A thread has a directory of its own beside the processes, which is not listed (proc_tid(5)).
            paths.append(f"/proc/{thread}")
    watches: list[int] = []
    try:
        for path in paths:
            watches.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fcntl.fcntl(watches[-1], fcntl.F_NOTIFY, _DN_MODIFY)
    except OSError:
        close_all(watches)
        raise
    return watches


def was_written() -> bool:
    """Return whether a write was reported since the last `forget_writes`."""
    # A blocked signal stays pending, even one to the pid 1 of a namespace. It is never handled.
    return signal.SIGIO in signal.sigpending()


def forget_writes() -> None:
    """Forget the writes that were reported so far."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
    while signal.sigtimedwait([signal.SIGIO], 0) is not None:
        pass


class _Objects:
    def __init__(self) -> None:
        self.sockets = False
        self._ours = _own_pipes()
        self._facts: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._pipes: dict[tuple[int, int], str] = {}

    def look(self, pid: int) -> None:
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - pathlib is not loaded in pid 1
            path = f"/proc/{pid}/fd/{fd}"
            target = os.readlink(path)  # noqa: PTH115
            if target.startswith("socket:"):
                self.sockets = True
            elif target.startswith(_EVENT_QUEUES):
                _require_waiting(pid)
            elif target != "/dev/null" and not target.startswith("anon_inode:"):
                self._look_at(path, target)

    def _look_at(self, path: str, target: str) -> None:
        status = os.stat(path)  # noqa: PTH116
        name = (status.st_dev, status.st_ino)
        if stat.S_ISFIFO(status.st_mode):
            # No process waits for a reader of a pipe, which has no name. A FIFO needs a holder that may read.
            if name not in self._ours and not self._pipes.get(name):
                self._pipes[name] = path if target.startswith("pipe:") or _readable(path) else ""
        elif stat.S_ISREG(status.st_mode) and target.startswith(_MEMORY_FILES):
            self._facts[name] = _memory(path, status)
        elif stat.S_ISREG(status.st_mode) and target.endswith(" (deleted)"):
            # No directory has it, so no comparison of directories shows it.
            self._facts[name] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        elif stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in TERMINALS:
            self._facts[name] = _terminal(path)
        elif status.st_rdev == MASTER and stat.S_ISCHR(status.st_mode):
            raise _OpaqueError("the master end of a terminal")

    def facts(self) -> dict[Any, Any]:
        return self._facts | {name: _unread(path) for name, path in self._pipes.items()}


def _own_pipes() -> set[tuple[int, int]]:
    own = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib is not loaded in pid 1
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            status = os.fstat(int(fd))
            if stat.S_ISFIFO(status.st_mode):
                own.add((status.st_dev, status.st_ino))
    return own


def _thread(directory: str, thread: int) -> tuple[Any, ...]:
    text = shown(f"{directory}/status")
    # The masks that follow belong to the thread itself: a shell changes its own whenever it starts something.
    signals = text[text.index(b"SigPnd:") : text.index(b"SigBlk:")]
    cpus = text[text.index(b"Cpus_allowed:") : text.index(b"Mems_allowed:")]
    tracer = text[text.index(b"TracerPid:") :].split(b"\n", 1)[0]
    # A real-time signal that is sent again waits twice, and its mask shows it once (signal(7)).
    if any(int(signals.split(None, 4)[number], 16) >> _FIRST_REAL_TIME for number in (1, 3)):
        raise _OpaqueError("real-time signals wait")
    return signals, cpus, tracer, *_scheduling(thread)


_libc = ctypes.CDLL(None, use_errno=True)
_scheduled = ctypes.create_string_buffer(_SCHED_ATTRIBUTE_BYTES)


def _scheduling(thread: int) -> tuple[bytes, int]:
    if kernel.MACHINE not in _NUMBERS:
        raise _OpaqueError("scheduling")
    attributes, io_priority, _ = _NUMBERS[kernel.MACHINE]
    if _libc.syscall(attributes, thread, _scheduled, _SCHED_ATTRIBUTE_BYTES, 0) < 0:
        raise _OpaqueError("scheduling")
    # 1 is IOPRIO_WHO_PROCESS (ioprio_get(2)).
    return _scheduled.raw, _libc.syscall(io_priority, 1, thread)


def inherited(pid: int) -> list[str]:
    """Return what a process passes on and no file or session has: scheduling, I/O priority, CPUs; empty if ended."""
    try:
        attributes, io_priority = _scheduling(pid)
        # Which CPUs a sandbox has depends on chance (`limits.cpus`).
        cpus = "own" if (allowed := os.sched_getaffinity(pid)) == os.sched_getaffinity(0) else sorted(allowed)
        settings = [shown(f"/proc/{pid}/{name}").decode() for name in ("oom_score_adj", "coredump_filter")]
        # A process that is ending, or a zombie, has given its memory up, and its filter reads as empty.
        return [attributes.hex(), str(io_priority), str(cpus), *settings] if all(settings) else []
    except (OSError, _OpaqueError):
        return []


def passed_on(pid: int) -> list[str]:
    """Return what `inherited` returns, resource limits, and the niceness of the session. Empty as for `inherited`."""
    niceness = b""
    try:
        limits = shown(f"/proc/{pid}/limits").decode()
        # Not every kernel has this file (sched(7), "The autogroup feature").
        with contextlib.suppress(FileNotFoundError):
            niceness = shown(f"/proc/{pid}/autogroup").rpartition(b" ")[2]
    except OSError:
        return []
    return [*now, limits, niceness.decode()] if (now := inherited(pid)) else []


def settings(pid: int) -> list[str]:
    """Return what a process passes on, or has others see, that a command may change; empty as for `inherited`."""
    # These are what `passed_on` returns, and who may use the directories of terminals and processes, with their times.
    # Nothing of that is in a file or session.
    try:
        held = [os.stat(f"/proc/{pid}/root{name}") for name in _OPEN_TO_ALL]  # noqa: PTH116
    except OSError:
        return []
    shown = [f"{status.st_mode:o} {status.st_uid} {status.st_gid}" for status in held]
    # Programs that work at a terminal change the time of `ptmx`.
    shown += [str(status.st_mtime_ns) for status in held[1:]]
    return [*now, *shown] if (now := passed_on(pid)) else []


def _readable(path: str) -> bool:
    text = shown(path.replace("/fd/", "/fdinfo/"))
    flags = next(int(line.split()[1], 8) for line in text.splitlines() if line.startswith(b"flags:"))
    return flags & os.O_ACCMODE != os.O_WRONLY


def _unread(path: str) -> tuple[int, bytes]:
    """Return the capacity of a pipe or FIFO and what is in it, by the path of a descriptor."""
    # While a FIFO has a reader no open of another process waits for one, so opening it here wakes no process (fifo(7)).
    if not path:
        raise _OpaqueError("a FIFO has no reader")
    with Opened(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        size = unread_bytes(fd)
        capacity = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
        if not size:
            return capacity, b""
        # The same number of other bytes is another content. tee(2) copies it and takes nothing out.
        copy, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, capacity)
            if _libc.tee(fd, into, ctypes.c_size_t(size), 0) != size:
                raise _OpaqueError("a pipe that others read")
            return capacity, b"".join(_pieces(copy))
        finally:
            os.close(copy)
            os.close(into)


def _pieces(fd: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, _PAGE):
            yield data


def _terminal(path: str) -> tuple[Any, ...]:
    with Opened(os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        numbers = [fcntl.ioctl(fd, request, bytes(4)) for request in (termios.FIONREAD, termios.TIOCGETD, _TIOCGEXCL)]
        return repr(termios.tcgetattr(fd)), fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)), *numbers


def _memory(path: str, status: os.stat_result) -> tuple[Any, ...]:
    if max(status.st_blocks * 512, status.st_size) > _MAX_MEMORY_BYTES:
        raise _OpaqueError("a memfd is large")
    with Opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        content = b"".join(iter(lambda: os.read(fd, _PAGE), b""))
        return status.st_size, status.st_mtime_ns, fcntl.fcntl(fd, _F_GET_SEALS), content


def _require_waiting(pid: int) -> None:
    """Require that a thread of a process waits for descriptors, so that an event for one of them wakes it."""
    # A stopped thread does not wait, though its system call is that of one that does.
    waits = _NUMBERS.get(kernel.MACHINE, (0, 0, set[int]()))[2]
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib is not loaded in pid 1
        directory = f"/proc/{pid}/task/{thread}"
        number = shown(f"{directory}/syscall").split()[0]
        sleeps = shown(f"{directory}/stat").rpartition(b")")[2].split()[0] == b"S"
        if sleeps and number.isdigit() and int(number) in waits:
            return
    raise _OpaqueError("a queue of events that no thread waits for")
