"""Runs in a sandbox: sets one thing up and then says what it reads of it, again and again: `settings_probe.py NAME`.

It answers when a file `ask` is there, into a file `answer`, in a directory that has its name.
"""

import ctypes
import fcntl
import mmap
import os
import pty
import resource
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

Read = Callable[[], object]
PROBES: dict[str, Callable[[], Read]] = {}
"""What comes back, by name: each sets something up, and returns what reads it."""
LOST: dict[str, Callable[[], Read]] = {}
"""What no checkpoint holds."""
KEPT: list[object] = []
libc = ctypes.CDLL(None, use_errno=True)


def comes_back(probe: Callable[[], Read]) -> Callable[[], Read]:
    PROBES[probe.__name__] = probe
    return probe


def is_lost(probe: Callable[[], Read]) -> Callable[[], Read]:
    LOST[probe.__name__] = probe
    return probe


def prctl(option: int, *values: int) -> int:
    result: int = libc.prctl(option, *map(ctypes.c_ulong, (*values, 0, 0, 0, 0)[:4]))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
    return result


def waiting(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])


def status(*names: str) -> list[str]:
    return [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(names)]


def info(fd: int, name: str) -> list[str]:
    return [line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if line.startswith(name)]


def in_thread(act: Callable[[], object]) -> int:
    """Return the number of a thread that has done something and stays."""
    done = threading.Event()
    number: list[int] = []

    def run() -> None:
        number.append(threading.get_native_id())
        act()
        done.set()
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    done.wait()
    return number[0]


def child(act: Callable[[], object] = signal.pause) -> int:
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return pid


def connection() -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    KEPT.extend((server, near))
    return server, near, server.accept()[0]


def memory(length: int) -> tuple[mmap.mmap, int]:
    held = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    KEPT.append(held)
    return held, ctypes.addressof(ctypes.c_char.from_buffer(held))


@comes_back
def scheduling() -> Read:
    os.nice(7)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = in_thread(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 12))
    return lambda: [os.sched_getscheduler(0), *(os.getpriority(os.PRIO_PROCESS, who) for who in (0, number))]


@comes_back
def timer_slack() -> Read:
    prctl(29, 123456)
    return lambda: prctl(30)


@comes_back
def core_dump_filter() -> Read:
    path = Path("/proc/self/coredump_filter")
    path.write_text("0x11")
    return path.read_text


@comes_back
def limits() -> Read:
    os.umask(0o37)
    resource.setrlimit(resource.RLIMIT_NOFILE, (77, 99))
    return lambda: [status("Umask"), [resource.getrlimit(limit) for limit in range(16)]]


@comes_back
def flags_of_the_process() -> Read:
    prctl(1, 10)
    prctl(36, 1)
    prctl(41, 1)
    prctl(28, 1)

    def read() -> object:
        values = (ctypes.c_int * 2)()
        libc.prctl(2, ctypes.byref(values, 0))
        libc.prctl(37, ctypes.byref(values, 4))
        return list(values), prctl(42), prctl(27)

    return read


@comes_back
def names_and_rights() -> Read:
    libc.prctl(15, b"renamed", 0, 0, 0)
    files = [Path(f"/proc/self/{name}") for name in ("comm", "cmdline", "oom_score_adj")]
    files[2].write_text("600")
    return lambda: [*(file.read_text() for file in files), status("Cap", "NoNew", "Seccomp", "Groups", "Uid", "Gid")]


@comes_back
def rights_of_a_thread() -> Read:
    number = in_thread(lambda: libc.syscall(ctypes.c_long({"x86_64": 122}.get(os.uname().machine, 151)), 1234))
    text = Path(f"/proc/self/task/{number}/status")
    return lambda: [line for line in text.read_text().splitlines() if line.startswith(("Uid", "Cap"))]


@comes_back
def filter_of_its_own() -> Read:
    """A seccomp filter that has `personality` fail with 99."""
    number = {"x86_64": 135}.get(os.uname().machine, 92)
    parts = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | 99), (6, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *part) for part in parts))
    rule = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)))
    libc.prctl(22, 2, rule, 0, 0)
    return lambda: (libc.syscall(ctypes.c_long(number), ctypes.c_ulong(0xFFFFFFFF)), ctypes.get_errno())


@comes_back
def signals() -> Read:
    signal.pthread_sigmask(signal.SIG_BLOCK, {10, 12, 40})
    signal.signal(13, signal.SIG_IGN)
    os.kill(os.getpid(), 10)
    for value in (3, 4):
        libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(value))
    return lambda: status("SigP", "SigB", "SigI", "ShdP")


@comes_back
def timers() -> Read:
    for number in (14, 26, 27):
        signal.signal(number, signal.SIG_IGN)
    for which, seconds in enumerate((5000, 1000, 900)):
        signal.setitimer(which, seconds, 7)
    return lambda: [[round(value / 100) for value in signal.getitimer(which)] for which in (0, 1, 2)]


@comes_back
def event_counter() -> Read:
    fd = os.eventfd(5, os.EFD_NONBLOCK)
    return lambda: info(fd, "eventfd-count")


@comes_back
def watch_for_one_event() -> Read:
    held = select.epoll()
    near, far = socket.socketpair()
    KEPT.extend((near, far))
    held.register(near.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
    far.send(b"x")
    held.poll(0)
    return lambda: held.poll(0)


@comes_back
def watch_of_a_watch() -> Read:
    near, far = socket.socketpair()
    inner, outer = select.epoll(), select.epoll()
    KEPT.extend((near, far, inner))
    inner.register(near.fileno(), select.EPOLLIN)
    outer.register(inner.fileno(), select.EPOLLIN)
    far.send(b"x")
    return lambda: [len(inner.poll(0)), len(outer.poll(0))]


@comes_back
def nameless_memory() -> Read:
    fd = os.memfd_create("m", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    os.pwrite(fd, b"data", 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    shared = mmap.mmap(fd, 4096)
    return lambda: [fcntl.fcntl(fd, fcntl.F_GET_SEALS), shared[:4]]


@comes_back
def locks() -> Read:
    files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in "ab"]
    KEPT.extend(files)
    fcntl.flock(files[0], fcntl.LOCK_EX)
    fcntl.lockf(files[1], fcntl.LOCK_EX, 10, 5)
    held = Path("/proc/locks")
    own = str(os.getpid())
    return lambda: sorted(" ".join(line.split()[1:4]) for line in held.read_text().splitlines() if own in line.split())


@comes_back
def pipe() -> Read:
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 17)
    os.write(into, b"q" * 70000)
    os.set_blocking(out, False)
    return lambda: [fcntl.fcntl(into, fcntl.F_GETPIPE_SZ), waiting(out), fcntl.fcntl(out, fcntl.F_GETFL)]


@comes_back
def options_of_connections() -> Read:
    server, near, far = connection()
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 4)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 33)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4321)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 9, 0))
    options = (
        (1, 2),
        (1, 7),
        (1, 8),
        (1, 9),
        (1, 12),
        (1, 15),
        (1, 20),
        (6, 1),
        (6, 4),
        (6, 9),
        (6, 13),
        (6, 18),
        (6, 23),
    )
    return lambda: [[held.getsockopt(*name, 16) for name in options] for held in (server, near, far)]


def changed_options(held: socket.socket) -> list[tuple[int, int]]:
    """Change every option of a socket that takes another number, and return those that it keeps."""
    changed = []
    for level, option in ((level, option) for level in (0, 41, 17, 6, 1) for option in range(120)):
        try:
            was = held.getsockopt(level, option, 16)
        except OSError:
            continue
        for value in (was[0] ^ 1, 1, 2, 5, was[0] * 2) if len(was) == 4 and (level, option) not in NO_CHOICE else ():
            try:
                held.setsockopt(level, option, value)
                if held.getsockopt(level, option, 16) != was:
                    changed.append((level, option))
                    break
            except OSError:
                continue
    return changed


NO_CHOICE = {
    (1, 10),
    (1, 26),
    (1, 27),
    (1, 35),
    (1, 49),
    (1, 50),
    (1, 51),
    (1, 73),
    (6, 3),
    (6, 10),
    (6, 12),
    (6, 19),
    (17, 1),
}
"""SO_OOBINLINE, which hides urgent bytes; filters; options that change by themselves, or that send nothing any more."""


def every_option(held: list[socket.socket]) -> Read:
    shown = [(each, *name) for each in held for name in changed_options(each)]
    return lambda: [(level, option, each.getsockopt(level, option, 16)) for each, level, option in shown]


@comes_back
def every_option_of_connections() -> Read:
    unconnected = socket.socket()
    unconnected.bind(("127.0.0.1", 0))
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    near = socket.create_connection(server.getsockname()[:2])
    KEPT.append(server.accept()[0])
    first, second, far = connection()
    KEPT.append(far)
    return every_option([unconnected, server, near, first, second])


@comes_back
def every_option_of_datagrams() -> Read:
    held = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)]
    held[0].bind(("127.0.0.1", 0))
    held[1].bind(("::1", 0))
    return every_option(held)


@comes_back
def every_option_of_unix_sockets() -> Read:
    near, far = socket.socketpair()
    server, datagrams = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind("server")
    server.listen()
    datagrams.bind("datagrams")
    KEPT.append(far)
    return every_option([near, server, datagrams])


@comes_back
def names_of_unix_datagrams() -> Read:
    server, client = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    server.bind("server")
    client.bind("client")
    client.connect("server")
    client.send(b"x")
    return lambda: [client.getpeername(), server.recvfrom(9, socket.MSG_PEEK)]


@comes_back
def closed_halves_of_connections() -> Read:
    _, near, far = connection()
    near.send(b"rest")
    near.shutdown(socket.SHUT_WR)
    far.settimeout(5)
    return lambda: far.recv(9, socket.MSG_PEEK)


@comes_back
def queues_of_unix_sockets() -> Read:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    KEPT.append(near)
    near.send(b"one")
    near.send(b"two")
    return lambda: [far.recv(9, socket.MSG_PEEK), waiting(far.fileno())]


@comes_back
def advice_on_memory() -> Read:
    _, start = memory(1 << 22)
    for place, advice in enumerate((10, 12, 14, 15, 16, 18)):
        libc.madvise(ctypes.c_void_p(start + place * 64 * 4096), ctypes.c_size_t(32 * 4096), advice)
    libc.mlock(ctypes.c_void_p(start + 600 * 4096), ctypes.c_size_t(4 * 4096))
    libc.mprotect(ctypes.c_void_p(start + 700 * 4096), ctypes.c_size_t(4 * 4096), 0)
    libc.prctl(0x53564D41, 0, ctypes.c_ulong(start + 800 * 4096), ctypes.c_ulong(8 * 4096), b"named")

    def read() -> object:
        parts: list[tuple[str, list[str]]] = []
        head = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if "-" in first:
                begin = int(first.split("-")[0], 16)
                head = " ".join(line.split()[1:2] + line.split()[5:]) if start <= begin < start + (1 << 22) else ""
            elif first == "VmFlags:" and head:
                parts.append((head, [flag for flag in line.split()[1:] if flag != "sd"]))
        return parts

    return read


@comes_back
def memory_that_forks_do_not_see() -> Read:
    held, start = memory(4096)
    held[0] = 7
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(4096), 18)

    def read() -> int:
        pid = child(lambda: os._exit(held[0]))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return read


@comes_back
def terminal() -> Read:
    """In raw mode, so all input comes back."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 44, 5, 6))
    settings = termios.tcgetattr(slave)
    settings[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    os.write(master, b"typed")
    os.write(slave, b"shown")
    return lambda: [fcntl.ioctl(slave, termios.TIOCGWINSZ, bytes(8)), repr(termios.tcgetattr(slave)),
                    waiting(slave), waiting(master), os.ttyname(slave)]  # fmt: skip


@comes_back
def children() -> Read:
    stopped, ended = child(), child(lambda: os._exit(7))
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(stopped, os.WUNTRACED)
    files = [Path(f"/proc/{pid}/stat") for pid in (stopped, ended)]
    return lambda: [
        [file.read_text().rpartition(")")[2].split()[0] for file in files],
        getattr(os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT), "si_status", None),
    ]


@comes_back
def descriptors() -> Read:
    fds = [os.open("f", os.O_CREAT | os.O_RDWR | os.O_APPEND), os.open(".", os.O_PATH), os.open("f", os.O_RDONLY)]
    os.set_inheritable(fds[1], True)
    return lambda: [(fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETFD)) for fd in fds]


@comes_back
def files_of_its_own_in_proc() -> Read:
    files = [os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("stat", "statm", "status", "maps")]
    own = str(os.getpid()).encode()

    def read() -> object:
        for file in files:
            os.lseek(file, 0, os.SEEK_SET)
        return [os.read(files[0], 99).split()[0] == own, *(bool(os.read(file, 99)) for file in files[1:])]

    return read


def watch(path: str, mask: int) -> int:
    fd: int = libc.inotify_init1(os.O_NONBLOCK)
    if libc.inotify_add_watch(fd, path.encode(), mask) < 0:
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return fd


@comes_back
def watched_directories() -> Read:
    places = [Path("watched/deep"), Path("/tmp/watched"), Path("/usr/lib")]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    fds = [watch(str(place), 0x100) for place in places]

    def read() -> object:
        seen = []
        for number, (place, fd) in enumerate(zip(places[:2], fds, strict=False)):
            (place / f"n{time.time_ns()}").touch()
            seen.append((number, struct.unpack_from("iI", os.read(fd, 4096))))
        return seen

    return read


@is_lost
def multicast_groups() -> Read:
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    KEPT.append(held)
    held.setsockopt(socket.IPPROTO_IP, 35, socket.inet_aton("239.1.2.3") + socket.inet_aton("127.0.0.1"))
    return lambda: "030201EF" in Path("/proc/net/igmp").read_text()


@is_lost
def urgent_bytes() -> Read:
    near, far = socket.socketpair()
    KEPT.append(near)
    near.send(b"ab")
    near.send(b"X", socket.MSG_OOB)
    return lambda: far.recv(1, socket.MSG_OOB | socket.MSG_PEEK)


@is_lost
def semaphore() -> Read:
    KEPT.append(os.eventfd(5, os.EFD_SEMAPHORE))
    return lambda: 0


@is_lost
def file_that_is_watched_twice() -> Read:
    near, _ = socket.socketpair()
    held = select.epoll()
    for fd in (near.fileno(), os.dup(near.fileno())):
        held.register(fd, select.EPOLLIN)
    KEPT.extend((near, held))
    return lambda: 0


@is_lost
def connection_that_nobody_accepted() -> Read:
    server = socket.create_server(("127.0.0.1", 0))
    KEPT.extend((server, socket.create_connection(server.getsockname())))
    return lambda: 0


@is_lost
def connection_without_its_other_end() -> Read:
    near, far = connection()[1:]
    near.close()
    return lambda: far.getpeername()[0]


@is_lost
def connection_that_has_ended() -> Read:
    _, near, far = connection()
    near.shutdown(socket.SHUT_WR)
    far.shutdown(socket.SHUT_WR)
    KEPT.append(far)
    return lambda: 0


@is_lost
def error_that_waits() -> Read:
    near, far = connection()[1:]
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()

    def read() -> int | None:
        try:
            far.recv(1)
        except OSError as error:
            return error.errno
        return None

    return read


@is_lost
def bytes_that_wait_to_be_sent() -> Read:
    _, near, far = connection()
    near.setblocking(False)
    sent = 0
    try:
        while True:
            sent += near.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    far.settimeout(5)

    def read() -> bool:
        got = 0
        while got < sent:
            got += len(far.recv(1 << 16))
        return got == sent

    return read


def unix_connection(name: str = "") -> tuple[socket.socket, socket.socket]:
    """Return a listening socket, and one that is connected to it and may have a name of its own."""
    server, near = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    server.bind("server")
    server.listen()
    if name:
        near.bind(name)
    near.connect("server")
    KEPT.extend((server, near, server.accept()[0]))
    return server, near


@is_lost
def unix_connection_without_its_listener() -> Read:
    server, near = unix_connection()
    server.close()
    return near.getpeername


@is_lost
def unix_connection_of_a_client_with_a_name() -> Read:
    return unix_connection("client")[1].getpeername


@is_lost
def unix_datagrams_to_nobody() -> Read:
    server, near = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    server.bind("server")
    near.connect("server")
    server.close()
    return near.getpeername


@is_lost
def program_without_a_file() -> Read:
    program = os.memfd_create("program")
    os.write(program, Path("/bin/sleep").read_bytes())
    pid = child(lambda: os.execve(program, ["sleep", "1000"], {}))  # noqa: S606
    link = Path(f"/proc/{pid}/exe")
    while not str(link.readlink()).startswith("/memfd:"):
        time.sleep(0.01)
    return lambda: os.kill(pid, signal.SIGKILL)


@is_lost
def code_above_127() -> Read:
    pid = child(lambda: os._exit(137))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@is_lost
def watch_with_options() -> Read:
    KEPT.append(watch(".", 0x80000400))
    return lambda: 0


@is_lost
def signalled_changes() -> Read:
    folder, signals = os.open(".", os.O_RDONLY), list[int]()
    KEPT.append(folder)
    signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    fcntl.fcntl(folder, fcntl.F_SETSIG, signal.SIGUSR1)
    fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_MULTISHOT)

    def read() -> bool:
        signals.clear()
        Path("made").touch()
        return signals == [signal.SIGUSR1]

    return read


def raw_terminal(*, echo: bool = False) -> tuple[int, int]:
    master, slave = pty.openpty()
    settings = termios.tcgetattr(slave)
    settings[1] = 0
    settings[3] = termios.ECHO if echo else 0
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    KEPT.extend((master, slave))
    return master, slave


@is_lost
def terminal_without_its_other_end() -> Read:
    master, slave = raw_terminal()
    os.close(slave)

    def read() -> int | None:
        try:
            os.read(master, 1)
        except OSError as error:
            return error.errno
        return None

    return read


@is_lost
def stopped_output() -> Read:
    master, slave = raw_terminal()
    termios.tcflow(slave, termios.TCOOFF)
    return lambda: waiting(master)


@is_lost
def terminal_of_its_holders() -> Read:
    fcntl.ioctl(raw_terminal()[1], termios.TIOCEXCL)
    return lambda: 0


@is_lost
def echoed_input() -> Read:
    master, slave = raw_terminal(echo=True)
    os.write(master, b"typed")
    return lambda: [os.read(slave, 99), os.read(master, 99)]


@is_lost
def much_input() -> Read:
    master, slave = raw_terminal()
    os.set_blocking(master, False)
    os.write(master, bytes(20000))
    return lambda: waiting(slave)


@is_lost
def much_output() -> Read:
    master, slave = raw_terminal()
    os.write(slave, bytes(5000))
    return lambda: waiting(master)


@is_lost
def cpus_of_a_thread() -> Read:
    in_thread(lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
    return lambda: 0


@is_lost
def personality() -> Read:
    libc.personality(ctypes.c_ulong(8))
    return lambda: 0


@is_lost
def file_without_a_name() -> Read:
    KEPT.append(os.open(".", os.O_TMPFILE | os.O_RDWR))
    return lambda: 0


@is_lost
def events_that_wait() -> Read:
    KEPT.append(watch(".", 0x100))
    Path("early").touch()
    return lambda: 0


@is_lost
def line_that_is_being_typed() -> Read:
    master, slave = pty.openpty()
    os.write(master, b"half")
    KEPT.extend((master, slave))

    def read() -> bytes:
        os.write(master, b" line\n")
        return os.read(slave, 99)

    return read


@is_lost
def line_that_was_not_read() -> Read:
    master, slave = pty.openpty()
    os.write(master, b"whole\nhalf")
    KEPT.extend((master, slave))

    def read() -> tuple[bytes, bytes]:
        os.write(master, b" line\n")
        return os.read(slave, 99), os.read(slave, 99)

    return read


def main(name: str) -> None:
    Path(name).mkdir()
    os.chdir(name)
    read = (PROBES | LOST)[name]()
    while True:
        Path("ready").touch()
        while not Path("ask").exists():
            time.sleep(0.01)
        Path("ask").unlink()
        Path("said").write_text(f"{read()!r}")
        Path("said").rename("answer")


if __name__ == "__main__":
    main(sys.argv[1])
