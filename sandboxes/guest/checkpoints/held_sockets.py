"""What the sockets of a sandbox's processes have set and CRIU does not save, and what cannot be restored at all."""

# Theory of operation.
#
# The lists have every option that differed after a restore by CRIU 4.2 and Linux 6.18, when all that a program can set
# had been set (`tests/sandboxes/local/test_what_comes_back.py`). They are set again, also those that CRIU sets for some
# kinds of sockets.
#
# A connection is restored from both of its ends. So one that has lost its other end, or whose listening socket is gone,
# would come back as another one.

import contextlib
import os
import select
import socket
from collections.abc import Mapping

from sandboxes.guest.checkpoints.looking import NotDumpableError, events, kernel_text, taken
from sandboxes.linux.descriptors import counted

_ANY = (2, 12, 29, 35, 37, 40, 41, 42, 43, 45, 46, 47, 60, 63, 64, 73, 74, 75, 76, 82, 83, 44)
"""Options of SOL_SOCKET, such as SO_PRIORITY, SO_TIMESTAMP and SO_PASSPIDFD (asm-generic/socket.h). They are set after
the others, because IP_TOS changes SO_PRIORITY."""
_IPV4 = (1, 2, 4, 6, 7, 8, 10, 11, 12, 13, 15, 18, 20, 21, 23, 24, 25, 26, 33, 34, 49, 51)
"""Options of IPPROTO_IP, such as IP_RECVERR and IP_RECVTTL (linux/in.h). A socket of IPv6 has them, too."""
_IPV6 = (
    2, 3, 4, 5, 8, 11, 16, 17, 18, 19, 23, 25, 29, 30, 31, 33, 51, 53, 56, 58, 60, 62, 66, 67, 70, 72, 73, 74, 77,
)  # fmt: skip
"""Options of IPPROTO_IPV6, such as IPV6_UNICAST_HOPS and IPV6_TCLASS (linux/in6.h)."""
_NOT_OF_STREAMS = {(0, 33), (41, 17), (41, 18)}
"""IP_MULTICAST_TTL, IPV6_MULTICAST_IF and IPV6_MULTICAST_HOPS, which the packets of a connection set."""
_TCP = (2, 7, 8, 9, 10, 13, 16, 18, 23, 25, 27, 30, 34, 36, 37)
"""Options of IPPROTO_TCP, such as TCP_CONGESTION and TCP_USER_TIMEOUT (linux/tcp.h)."""
_BEFORE_A_CONNECTION = ((6, 2), (6, 10))
"""TCP_MAXSEG and TCP_WINDOW_CLAMP. Of a connection, they show what was agreed on."""
_UDP = (100, 101, 102, 103, 104)
"""Options of IPPROTO_UDP, such as UDP_SEGMENT (linux/udp.h)."""
_REUSEPORT = (socket.SOL_SOCKET, 15)
"""SO_REUSEPORT, which CRIU sets in order to connect again, and leaves set."""
_OPTION_BYTES = 16
_TCP_INFO, _TCP_ULP = 11, 31
_CLOSED, _LISTENING = 7, 10
"""States of TCP (net/tcp_states.h)."""
_SIOCOUTQNSD = 0x894B
"""An ioctl that counts bytes of a connection which were not sent yet (linux/sockios.h)."""
_EVERYBODY = ("010000E0", "ff01" + "0" * 27 + "1", "ff02" + "0" * 27 + "1", "ff02" + "0" * 17 + "1ff")
"""The multicast groups that a kernel joins by itself, as /proc/net/igmp and igmp6 have them; the last is a prefix."""
_MAPPED = "::ffff:"
"""How an address of IPv4 begins in a socket of IPv6."""

_End = tuple[object, ...]
Options = dict[str, str]
"""Values of options, as hexadecimal digits, by the process, the descriptor, the level and the number."""


class HeldSockets:
    """One look at the sockets of a sandbox's processes, in its pid namespace."""

    def __init__(self) -> None:
        self.options: Options = {}
        # Values of new sockets, by family, type and protocol.
        self._new: dict[tuple[int, int, int], Mapping[tuple[int, int], bytes]] = {}
        self._ends: dict[_End, int] = {}
        self._listening: set[object] = set()
        self._datagrams: set[object] = set()
        self._named: list[tuple[int, object, set[object]]] = []

    def look(self, pid: int, number: int) -> None:
        """Note what a restore has to set again. Raises NotDumpableError for what no checkpoint holds."""
        with taken(pid, number) as fd, socket.socket(fileno=os.dup(fd)) as held:
            if held.type == socket.SOCK_STREAM and _is_urgent(held):
                raise NotDumpableError(f"process {pid} has not read urgent data, and a checkpoint does not hold that")
            found, connected = events(fd), False
            if found & select.POLLERR:
                raise NotDumpableError(f"an error waits in a socket of process {pid}, and a checkpoint loses it")
            if held.family == socket.AF_UNIX:
                self._look_at_names(pid, held)
            elif held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM:
                connected = self._look_at_connection(pid, held, found)
            self._look_at_options(pid, number, held, connected=connected)

    def require_whole(self) -> None:
        """Raise unless all connections have both ends, and the sockets that gave them their names."""
        _require_no_groups()
        for (near, far), pid in self._ends.items():
            if (far, near) not in self._ends:
                raise NotDumpableError(
                    f"the other end of a connection of process {pid} is closed, or nobody has accepted it yet"
                )
        for pid, name, others in self._named:
            if name not in others:
                raise NotDumpableError(f"the socket that process {pid} has connected to is closed, or it has two names")

    def _look_at_names(self, pid: int, held: socket.socket) -> None:
        name = held.getsockname()
        if held.type == socket.SOCK_DGRAM:
            self._datagrams.add(name)
            with contextlib.suppress(OSError):
                if peer := held.getpeername():
                    self._named.append((pid, peer, self._datagrams))
        elif held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self._listening.add(name)
        elif name and isinstance(name, str):
            # CRIU would remove the file that it is bound to.
            with contextlib.suppress(OSError):
                held.getpeername()
                self._named.append((pid, name, self._listening))

    def _look_at_connection(self, pid: int, held: socket.socket, found: int) -> bool:
        """Return whether a socket of TCP is connected; `found` is what `events` has returned."""
        state = held.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
        if state == _CLOSED and found & select.POLLRDHUP:
            raise NotDumpableError(f"process {pid} holds a connection that has ended, which does not come back so")
        if state in (_CLOSED, _LISTENING):
            return False
        if _option(held, socket.IPPROTO_TCP, _TCP_ULP):
            raise NotDumpableError(f"a connection of process {pid} has a protocol of the kernel above TCP")
        if counted(held.fileno(), _SIOCOUTQNSD):
            raise NotDumpableError(f"process {pid} has sent more than the other end of a connection can take yet")
        near, far = ((name[0].removeprefix(_MAPPED), name[1]) for name in (held.getsockname(), held.getpeername()))
        self._ends[near, far] = pid
        return True

    def _look_at_options(self, pid: int, number: int, held: socket.socket, *, connected: bool) -> None:
        kind = (held.family, held.type, held.proto)
        if kind not in self._new:
            self._new[kind] = _values_of_new(*kind)
        changed: dict[tuple[int, int], bytes] = {}
        for name, value in self._new[kind].items():
            if connected and name in _BEFORE_A_CONNECTION:
                continue
            now = _option(held, *name)
            if now is not None and (now != value or name == _REUSEPORT):
                changed[name] = now
        if changed and (lost := _refused(kind, changed)):
            raise NotDumpableError(
                f"option {lost[1]} (level {lost[0]}) of a socket of process {pid} cannot be set again"
            )
        self.options |= {f"{pid} {number} {level} {option}": now.hex() for (level, option), now in changed.items()}


def set_options(options: Options) -> list[bytes]:
    """Set options again, in the sandbox's pid namespace."""
    for place, value in options.items():
        pid, number, level, option = map(int, place.split())
        with taken(pid, number) as fd, socket.socket(fileno=os.dup(fd)) as held:
            held.setsockopt(level, option, bytes.fromhex(value))
    return []


def _require_no_groups() -> None:
    """Raise if a socket in the sandbox's network, which all of its processes share, has joined a multicast group."""
    # A group is indented below its interface there, and stands behind it here (proc_pid_net(5)).
    joined = [line.split()[0] for line in kernel_text("/proc/1/net", "igmp").splitlines() if line.startswith("\t\t")]
    joined += [line.split()[2] for line in kernel_text("/proc/1/net", "igmp6").splitlines()]
    if not all(group.startswith(_EVERYBODY) for group in joined):
        raise NotDumpableError("a socket has joined a multicast group, and a checkpoint does not hold that")


def _values_of_new(family: int, kind: int, protocol: int) -> Mapping[tuple[int, int], bytes]:
    """Return the options that a new socket of this kind has; none of one that only others may make, such as `ping`."""
    is_internet = family in (socket.AF_INET, socket.AF_INET6)
    levels: dict[int, tuple[int, ...]] = {}
    if is_internet:
        levels |= {socket.IPPROTO_IP: _IPV4, socket.IPPROTO_UDP: _UDP}
        levels |= {socket.IPPROTO_TCP: _TCP} if kind == socket.SOCK_STREAM else {}
        levels |= {socket.IPPROTO_IPV6: _IPV6} if family == socket.AF_INET6 else {}
    levels |= {socket.SOL_SOCKET: (*_ANY, _REUSEPORT[1]) if is_internet else _ANY}
    try:
        new = socket.socket(family, kind, protocol)
    except OSError:
        return {}
    with new:
        names = [(level, option) for level, options in levels.items() for option in options]
        names = [name for name in names if kind != socket.SOCK_STREAM or name not in _NOT_OF_STREAMS]
        return {name: value for name in names if (value := _option(new, *name)) is not None}


def _refused(kind: tuple[int, int, int], values: Mapping[tuple[int, int], bytes]) -> tuple[int, int] | None:
    """Return an option that a new socket of this kind does not take; None if it takes all."""
    with socket.socket(*kind) as new:
        for (level, option), value in values.items():
            try:
                new.setsockopt(level, option, value)
            except OSError:
                return level, option
    return None


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
