"""What processes have set and CRIU does not save: it is set again after a restore, or nothing is dumped."""

# Theory of operation.
#
# Whatever a process can set was compared before a dump and after a restore by CRIU 4.2
# (`tests/sandboxes/local/test_what_comes_back.py`). What differed is one of three kinds:
#
# 1. Nothing shows it from outside, and programs do without it. The filter of a sandbox refuses to set it (`confine`).
# 2. It can be set again from outside. It is noted at the dump, and set again before the restored processes run.
# 3. All else. A process that has it is not dumped, and its state is reached by replay.
#
# All of it is looked at by a child of the operator, because only that has the sandbox's pids, and while CRIU holds the
# processes still.

import contextlib
import fcntl
import json
import os
import socket
import stat
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, unread_bytes
from sandboxes.linux.live_state import TERMINALS, inherited

_FILES = {"coredump_filter": "0x", "timerslack_ns": ""}
"""Files of a thread in /proc that are written again, and what stands before the number that they show."""
_O_TMPFILE = 0o20000000
"""Part of the flags of a file that was made without a name (`fdinfo`, proc_pid_fdinfo(5))."""
_TIOCSTI = 0x5412
"""Puts a byte into the input of a terminal (tty_ioctl(4))."""

_TCP = ((6, 9), (6, 13), (6, 18), (6, 23), (6, 7), (6, 8), (6, 16), (6, 25), (6, 36), (6, 37))
"""TCP_DEFER_ACCEPT, TCP_CONGESTION, TCP_USER_TIMEOUT, TCP_FASTOPEN, TCP_SYNCNT, TCP_LINGER2, TCP_THIN_LINEAR_TIMEOUTS,
TCP_NOTSENT_LOWAT, TCP_INQ and TCP_TX_DELAY, by level and number."""
_LISTENING = ((6, 2), (6, 10))
"""TCP_MAXSEG and TCP_WINDOW_CLAMP. Of a connection, they show what was agreed on."""
_ANY = (
    (1, 29), (1, 35), (0, 11), (41, 25), (1, 37), (1, 40), (1, 42), (1, 43), (1, 47), (0, 10), (0, 12), (0, 13),
    (0, 24), (0, 51),
)  # fmt: skip
"""SO_TIMESTAMP, SO_TIMESTAMPNS, IP_RECVERR, IPV6_RECVERR, SO_TIMESTAMPING, SO_RXQ_OVFL, SO_PEEK_OFF, SO_NOFCS,
SO_MAX_PACING_RATE, IP_MTU_DISCOVER, IP_RECVTTL, IP_RECVTOS, IP_BIND_ADDRESS_NO_PORT and IP_LOCAL_PORT_RANGE."""
_DATAGRAMS = ((0, 33), (0, 34), (41, 18), (41, 19), (0, 49), (17, 103), (17, 104))
"""IP_MULTICAST_TTL and IP_MULTICAST_LOOP, their forms in IPv6, IP_MULTICAST_ALL, UDP_SEGMENT and UDP_GRO."""
_EVERYBODY = ("010000E0", "ff01" + "0" * 27 + "1", "ff02" + "0" * 27 + "1", "ff02" + "0" * 17 + "1ff")
"""The multicast groups that a kernel joins by itself, as /proc/net/igmp and igmp6 have them; the last is a prefix."""
_REUSEPORT = (1, 15)
"""SO_REUSEPORT, which CRIU sets in order to connect again, and leaves set."""
_OPTION_BYTES = 16
MAX_NOTED = 5_000
"""Limits what is set again, about 20 us each while the processes stand still. Each TCP socket counts once."""

Noted = dict[str, str]
"""What is set again: texts of files by their paths, and values of sockets' options, as hexadecimal digits, by the
process, the descriptor, the level and the option."""


class NotDumpableError(Exception):
    """The processes must not be dumped; the text says why."""


def look(pids: Iterable[int], held: Iterable[tuple[int, int, bytes]]) -> Noted:
    """Return what a restore has to set again; to be run in the sandbox's pid namespace (`in_child`).

    `held` has the processes' descriptors: the process, the number, and what the kernel calls it.
    """
    noted: Noted = {}
    _require_no_groups()
    # Restored processes begin with what pid 1 has: CRIU is its child then.
    own = {name: _text("/proc/1", name) for name in _FILES}
    born, personality = inherited(1)[1:3], _text("/proc/1", "personality")
    looked_at: set[bytes] = set()
    for pid in pids:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - pathlib is not loaded in pid 1
        for thread in threads:
            _require_restorable(int(thread), born, personality)
            # A thread has a directory of its own beside the processes, which is not listed (proc_tid(5)).
            texts = {name: _text(f"/proc/{thread}", name) for name in _FILES}
            changed = [name for name, text in texts.items() if text not in ("", own[name])]
            noted |= {f"/proc/{thread}/{name}": _FILES[name] + texts[name] for name in changed}
    for pid, number, target in held:
        if not target.startswith(b"socket:["):
            _require_saved(pid, number, os.fsdecode(target))
        elif target not in looked_at:
            noted |= _options(pid, number)
        looked_at.add(target)
    if len(noted) > MAX_NOTED:
        raise NotDumpableError(f"the processes have changed more than {MAX_NOTED} settings of threads and sockets")
    return noted


def put_back(noted: Noted) -> None:
    """Set what was noted again, before the restored processes run. `OSError` says that it cannot be set."""
    files = {name: text for name, text in noted.items() if name.startswith("/proc/")}
    for path, text in files.items():
        with open(path, "w") as file:  # noqa: PTH123
            file.write(text)
    options = {tuple(map(int, name.split())): value for name, value in noted.items() if name not in files}
    if options:
        try:
            in_child(lambda: _set_options(options))
        except NotDumpableError as error:
            raise OSError(str(error)) from error


def in_child(act: Callable[[], list[bytes]]) -> list[bytes]:
    """Return what a function returns in a child, which belongs to the pid namespace that this process has entered."""
    # What is returned has no zero bytes.
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        reason, answers = "its processes cannot be looked at", list[bytes]()
        try:
            answers = act()
            reason = ""
        except NotDumpableError as error:
            reason = str(error)
        except OSError as error:
            reason = f"its processes cannot be looked at: {error}"
        finally:
            with os.fdopen(writing, "wb") as answer:
                answer.write(b"\0".join((reason.encode()[:1024], *answers)))
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text, *answers = answer.read().split(b"\0")
    os.waitpid(pid, 0)
    if text:
        raise NotDumpableError(text.decode(errors="replace"))
    return answers


def as_bytes(noted: Noted) -> bytes:
    """Return what was noted as an answer of `in_child`."""
    return json.dumps(noted).encode()


def from_bytes(data: bytes) -> Noted:
    """Return what `as_bytes` was given."""
    noted: Noted = json.loads(data)
    return noted


def _text(directory: str, name: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"{directory}/{name}") as file:  # noqa: PTH123
        return file.read().strip()
    return ""


def _require_no_groups() -> None:
    """Raise if a socket in the sandbox's network, which all of its processes share, has joined a multicast group."""
    # A group is indented below its interface there, and stands behind it here (proc_pid_net(5)).
    joined = [line.split()[0] for line in _text("/proc/1/net", "igmp").splitlines() if line.startswith("\t\t")]
    joined += [line.split()[2] for line in _text("/proc/1/net", "igmp6").splitlines()]
    if not all(group.startswith(_EVERYBODY) for group in joined):
        raise NotDumpableError("a socket has joined a multicast group, and a checkpoint does not hold that")


def _require_restorable(thread: int, born: list[str], personality: str) -> None:
    now = inherited(thread)
    if now and born and now[1:3] != born:
        raise NotDumpableError(
            "the CPUs or the priority of I/O of a process were changed, and a checkpoint does not hold that"
        )
    if _text(f"/proc/{thread}", "personality") != personality:
        raise NotDumpableError(f"process {thread} has another personality (setarch), and a checkpoint does not hold it")


def _require_saved(pid: int, number: int, target: str) -> None:
    where = f"process {pid} holds "
    if target == "anon_inode:[eventfd]" and ("eventfd-semaphore", "1") in _info(pid, number):
        raise NotDumpableError(f"{where}an eventfd that is a semaphore, and a checkpoint does not hold that")
    if target == "anon_inode:[eventpoll]":
        watched = [text.partition("ino:")[2] for name, text in _info(pid, number) if name == "tfd"]
        # All nameless files share one inode, and CRIU tells those apart.
        nameless = _nameless_inode()
        named = [file for file in watched if not file.startswith(nameless)]
        if len(named) != len(set(named)):
            raise NotDumpableError(f"{where}an epoll that watches one file twice, which no checkpoint brings back")
    if target == "anon_inode:inotify":
        with taken(pid, number) as fd:
            if unread_bytes(fd):
                raise NotDumpableError(
                    f"{where}an inotify queue with unread events, and a checkpoint does not hold them"
                )
    if target.startswith("/"):
        status = os.stat(f"/proc/{pid}/fd/{number}")  # noqa: PTH116
        if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in TERMINALS:
            _require_no_typing(f"/proc/{pid}/fd/{number}", f"{target} of process {pid}")
        if stat.S_ISREG(status.st_mode) and not status.st_nlink:
            flags = next((int(text, 8) for name, text in _info(pid, number) if name == "flags"), 0)
            if flags & _O_TMPFILE:
                raise NotDumpableError(f"{where}a file that may still get a name, and a checkpoint does not hold that")


def _info(pid: int, number: int) -> list[tuple[str, str]]:
    with open(f"/proc/{pid}/fdinfo/{number}") as file:  # noqa: PTH123
        pairs = (line.partition(":") for line in file)
        return [(name.strip(), text.strip()) for name, _, text in pairs]


def _nameless_inode() -> str:
    """Return how the inode of all nameless files shows in what epoll watches."""
    with Opened(os.eventfd(0, os.EFD_CLOEXEC)) as fd:
        return f"{os.fstat(fd).st_ino:x} "


@contextlib.contextmanager
def taken(pid: int, number: int) -> Iterator[int]:
    """Yield a duplicate of a descriptor of another process. In the sandbox's pid namespace (`in_child`)."""
    with Opened(os.pidfd_open(pid)) as process, Opened(kernel.take_descriptor(process, number)) as fd:
        yield fd


def _require_no_typing(path: str, subject: str) -> None:
    """Raise if input of a terminal that passes on whole lines was not read yet."""
    # CRIU reads whole lines and puts them behind the one that is being typed, also for the processes that run on, and a
    # restore lacks that one.
    with Opened(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        settings = termios.tcgetattr(fd)
        if not settings[3] & termios.ICANON:
            return
        reason = f"input waits at the terminal {subject}, and a checkpoint does not hold it"
        if unread_bytes(fd) or not kernel.holds(kernel.CAP_SYS_ADMIN):
            raise NotDumpableError(reason)
        # The line that is being typed shows only without lines.
        typed = b""
        termios.tcsetattr(fd, termios.TCSANOW, _with_local(settings, off=termios.ICANON | termios.ECHO))
        try:
            if count := unread_bytes(fd):
                typed = os.read(fd, count)
        finally:
            quiet = termios.ECHO | termios.ISIG | termios.IEXTEN
            termios.tcsetattr(fd, termios.TCSANOW, _with_local(settings, off=quiet))
            for byte in typed:
                fcntl.ioctl(fd, _TIOCSTI, bytes([byte]))
            termios.tcsetattr(fd, termios.TCSANOW, settings)
        if typed:
            raise NotDumpableError(reason)


def _options(pid: int, number: int) -> Noted:
    noted: Noted = {}
    with taken(pid, number) as fd, socket.socket(fileno=os.dup(fd)) as held:
        if held.type == socket.SOCK_STREAM and _is_urgent(held):
            raise NotDumpableError(f"process {pid} has not read urgent data, and a checkpoint does not hold that")
        is_tcp = held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM
        names = (*_ANY, *_TCP, _REUSEPORT) if is_tcp else (*_ANY, *_DATAGRAMS)
        if is_tcp and held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            names = (*names, *_LISTENING)
        try:
            new = socket.socket(held.family, held.type, held.proto)
        except OSError:
            # One that only others may make, such as the raw one of `ping`.
            return noted
        with new:
            for level, option in names:
                value = _option(held, level, option)
                if value is not None and (value != _option(new, level, option) or (level, option) == _REUSEPORT):
                    noted[f"{pid} {number} {level} {option}"] = value.hex()
    return noted


def _is_urgent(held: socket.socket) -> bool:
    """Return whether a byte waits that was sent apart from the stream (MSG_OOB)."""
    try:
        return bool(held.recv(1, socket.MSG_OOB | socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _option(held: socket.socket, level: int, option: int) -> bytes | None:
    try:
        return held.getsockopt(level, option, _OPTION_BYTES)
    except OSError:
        return None


def _set_options(options: Mapping[tuple[int, ...], str]) -> list[bytes]:
    for (pid, number, level, option), value in options.items():
        with taken(pid, number) as fd, socket.socket(fileno=os.dup(fd)) as held:
            held.setsockopt(level, option, bytes.fromhex(value))
    return []


def _with_local(settings: list[Any], *, off: int) -> list[Any]:
    *others, local, read_bits, write_bits, characters = settings
    return [*others, local & ~off, read_bits, write_bits, characters]
