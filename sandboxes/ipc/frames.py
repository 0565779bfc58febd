"""Frames between our processes: a message (see `codec`), a body, and descriptors. Only `receive` does I/O."""

import array
import os
import socket
import struct
from typing import NamedTuple

HEADER = struct.Struct("!III")
MAX_BYTES = 1 << 31
"""The largest frame. Files of a sandbox cross in one frame, and no sandbox may hold that much."""
_PIECE = 1 << 16
"""The most bytes that one call receives. For twice as many, libc maps fresh pages at each call, and unmaps them."""
_DESCRIPTORS_AT_ONCE = 10
"""The most descriptors that accompany one frame: those of a sandbox that is restored."""
_MOST_PENDING = 64
"""The most descriptors that wait for the rest of their frames. A peer that sends more would use up this process's."""


class IpcFrame(NamedTuple):
    """A frame as it came: the message, the bytes after it, and descriptors, which the receiver closes."""

    content: bytes
    body: bytes
    fds: list[int]


class MalformedFrameError(ValueError):
    """The other end has sent something that is no frame, or a frame that is no message."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a frame from the other end cannot be read: {reason}")


def pack(content: bytes, body: bytes = b"", fds: int = 0) -> bytes:
    """Return a frame that a number of descriptors accompanies."""
    # The header gives all three lengths, so a reader knows at once how much to wait for.
    return HEADER.pack(len(content), len(body), fds) + content + body


def receive(end: socket.socket, max_bytes: int = _PIECE) -> tuple[bytes, list[int]]:
    """Return what a socket received, and its descriptors, close-on-exec (`socket.recv_fds` ignores its flags)."""
    fds = array.array("i")
    # `CMSG_LEN` without padding: more descriptors than this do not fit, and the kernel closes them.
    room = socket.CMSG_LEN(_DESCRIPTORS_AT_ONCE * fds.itemsize)
    # Close-on-exec from the first moment (`MSG_CMSG_CLOEXEC`): a fork between receiving and setting it would leak
    # them.
    data, carried, _, _ = end.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in carried:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            # The kernel may cut the list; what remains is whole numbers.
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


class Inbox:
    """Puts frames together from the pieces that a socket gives."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: list[int]) -> None:
        """Add a piece."""
        self._bytes += data
        # The kernel delivers descriptors with the first byte of their frame, so they arrive in the order of the
        # frames.
        self._fds += fds

    def close(self) -> None:
        """Forget what is no whole frame yet, and close its descriptors."""
        self._bytes.clear()
        while self._fds:
            os.close(self._fds.pop())

    def take(self) -> IpcFrame | None:
        """Return the next frame; None until it is whole. What is no frame is a `MalformedFrameError`."""
        # A descriptor comes with the first byte of its frame (unix(7)), so without bytes there is none.
        if len(self._fds) > _MOST_PENDING or (self._fds and not self._bytes):
            raise MalformedFrameError(f"{len(self._fds)} descriptors belong to no frame")
        if len(self._bytes) < HEADER.size:
            return None
        content_bytes, body_bytes, fds = HEADER.unpack_from(self._bytes)
        end = HEADER.size + content_bytes + body_bytes
        # Refused before the rest has come: a hostile length must not make the inbox grow.
        if end > MAX_BYTES:
            raise MalformedFrameError(f"{end} bytes")
        if len(self._bytes) < end:
            return None
        middle = HEADER.size + content_bytes
        # Copied out, because the buffer is cut below and reused.
        content, body = bytes(self._bytes[HEADER.size : middle]), bytes(self._bytes[middle:end])
        del self._bytes[:end]
        # The header says how many of the descriptors belong to this frame; the rest belong to the next.
        carried, self._fds = self._fds[:fds], self._fds[fds:]
        return IpcFrame(content, body, carried)
