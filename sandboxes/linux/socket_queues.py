"""The queues of a network namespace's sockets, which fill without any receiver running."""

# Theory of operation.
#
# A datagram, a connection or a message for a process that sleeps elsewhere stays in the kernel. No file shows it, and
# the receiver gets no CPU time. Two sources show it: /proc/net for the protocols that have tables there, and the socket
# diagnosis of netlink (sock_diag(7)) for Unix sockets, whose table in /proc/net has no queues.

import os
import socket
import struct
from collections.abc import Iterator

from sandboxes.linux.descriptors import Opened

_TABLES = ("udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6")
"""The tables with one layout: slot, addresses, state, queues, timers, retransmissions, user, timeout, inode, more.
TCP's table is not read: the kernel walks the connections of the whole machine for it, 5 ms with 260,000 buckets. Only
listening sockets can be filled by strangers, and a diagnosis lists these alone."""
_DROPS = 12
"""The column that counts datagrams that found no room."""
_NETLINK_QUEUES = (4, 5, 9)
"""The columns of /proc/net/netlink with both queues and the inode (Linux, net/netlink/af_netlink.c)."""
_PACKET_QUEUE = (6, 8)
"""The columns of /proc/net/packet with the receive queue and the inode (Linux, net/packet/af_packet.c)."""

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_RQLEN, _UNIX_DIAG_RQLEN, _TCP_LISTEN = 0x10, 4, 10
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_UNIX_REQUEST, _UNIX_ENTRY, _QUEUES = struct.Struct("=BBHIIIII"), struct.Struct("=BBBxIII"), struct.Struct("=II")
_TCP_REQUEST, _TCP_ENTRY = struct.Struct("=BBBxI48x"), struct.Struct("=4x48x4xIIII")
_DUMP_BYTES = 1 << 18
"""How much of a dump is read at once; the kernel sends at most 32 KiB in one message."""
_ANSWER_S = 1.0
"""How long the kernel may take for the next part of a dump, which it makes within the call that requests it."""

Queues = dict[tuple[str, ...], tuple[bytes, ...]]
"""What is queued in each socket, by protocol and inode."""


class SocketQueues:
    """Reads the queues of all sockets of the network namespace in which it was made."""

    def __init__(self) -> None:
        """Open the diagnosis, which stays in this network namespace; `OSError` if the kernel has none."""
        self._link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._link.settimeout(_ANSWER_S)
        self._sequence = 0

    @classmethod
    def open(cls) -> "SocketQueues | None":
        """Open the diagnosis; return None if this kernel has none."""
        try:
            return cls()
        except OSError:
            return None

    def read(self) -> Queues:
        """Return what is queued in each socket."""
        queues = dict(self._unix_sockets())
        for table in _TABLES:
            for fields in _rows(table):
                queues[table, fields[9].decode()] = (*fields[3:5], fields[_DROPS])
        for family in (socket.AF_INET, socket.AF_INET6):
            # The number of connections that wait, and how many may wait.
            request = _TCP_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
            for entry in self._dump(request):
                waiting, limit, _, inode = _TCP_ENTRY.unpack_from(entry)
                queues["tcp", str(inode)] = (b"%d" % waiting, b"%d" % limit)
        for table, columns in (("netlink", _NETLINK_QUEUES), ("packet", _PACKET_QUEUE)):
            for fields in _rows(table):
                *lengths, inode = (fields[column] for column in columns)
                queues[table, inode.decode()] = (*lengths,)
        return queues

    @property
    def datagrams(self) -> bool:
        """Whether datagrams wait in a socket of a network protocol."""
        return any(int(f.split(b":")[1], 16) for table in _TABLES for f in (row[4] for row in _rows(table)))

    def _unix_sockets(self) -> Iterator[tuple[tuple[str, ...], tuple[bytes, ...]]]:
        request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_RQLEN, 0, 0)
        for entry in self._dump(request):
            _, kind, state, inode, _, _ = _UNIX_ENTRY.unpack_from(entry)
            queues, at = b"", _UNIX_ENTRY.size
            while at + _ATTRIBUTE.size <= len(entry):
                length, attribute = _ATTRIBUTE.unpack_from(entry, at)
                if attribute == _UNIX_DIAG_RQLEN:
                    # For a listening socket these are the connections that wait, and how many may wait.
                    queues = entry[at + _ATTRIBUTE.size : at + _ATTRIBUTE.size + _QUEUES.size]
                at += max((length + 3) & ~3, _ATTRIBUTE.size)
            yield ("unix", str(inode)), (b"%d" % kind, b"%d" % state, queues)

    def _dump(self, request: bytes) -> Iterator[bytes]:
        self._sequence += 1
        length = _HEADER.size + len(request)
        self._link.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, self._sequence, 0) + request)
        while True:
            data = self._link.recv(_DUMP_BYTES)
            at = 0
            while at < len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
                # Another number belongs to an earlier request that was given up.
                if sequence == self._sequence:
                    if kind == _NLMSG_DONE:
                        return
                    if kind == _NLMSG_ERROR:
                        number = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                        raise OSError(number, f"socket diagnosis: {os.strerror(number)}")
                    yield data[at + _HEADER.size : at + length]
                at += (length + 3) & ~3

    def close(self) -> None:
        """Close the diagnosis."""
        self._link.close()


def lingering_connections() -> int:
    """Return how many closed TCP connections the kernel still remembers, for a minute each, in this namespace."""
    with open("/proc/net/sockstat", "rb") as file:  # noqa: PTH123 - pathlib is not loaded in pid 1
        for line in file:
            fields = line.split()
            if fields[0] == b"TCP:":
                return int(fields[fields.index(b"tw") + 1])
    return 0


def _rows(table: str) -> Iterator[list[bytes]]:
    """Yield the rows of a table in /proc/net; none if this kernel lacks the protocol."""
    try:
        fd = os.open(f"/proc/net/{table}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with Opened(fd):
        text = b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    # The first line is a heading.
    for line in text.splitlines()[1:]:
        yield line.split()
