"""The supervisor's end of its socket to the proxy."""

import errno
import socket
import sys
import time
from collections.abc import Sequence

from sandboxes.ipc.codec import Envelope, IpcMessage, decode, pack_message
from sandboxes.ipc.frames import Inbox, receive
from sandboxes.linux.descriptors import close_all

_OTHERS_S = 5.0
"""How long a descriptor waits to be sent while others hold more than a user may have under way."""


class DriverLink:
    """Sends and receives messages over a blocking socket. This process ends when the proxy closes its end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._inbox = Inbox()

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select.poll`."""
        return self._end.fileno()

    def close(self) -> None:
        """Close the socket, in a child that must not have it."""
        self._end.close()

    def receive(self) -> bool:
        """Take what has come on the socket; return False if the proxy is gone."""
        # Descriptors come with the bytes of their message (unix(7), SCM_RIGHTS); the inbox keeps both until a message
        # is whole.
        data, fds = receive(self._end)
        self._inbox.feed(data, fds)
        return bool(data)

    def take(self) -> Envelope[IpcMessage] | None:
        """Return the next message that has come whole; None if there is none."""
        frame = self._inbox.take()
        return None if frame is None else decode(frame)

    def wait(self) -> Envelope[IpcMessage]:
        """Wait for the next message; end this process if the proxy is gone."""
        while (envelope := self.take()) is None:
            if not self.receive():
                # In pid 1 this ends the whole sandbox, because the kernel kills its pid namespace.
                sys.exit(0)
        return envelope

    def send(self, message: IpcMessage, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay the caller's."""
        frame = pack_message(message, body, len(fds))
        # The descriptors travel with the first byte; a short write continues without them.
        sent = self._send_fds(frame, fds) if fds else 0
        self._end.sendall(memoryview(frame)[sent:])

    def _send_fds(self, frame: bytes, fds: Sequence[int]) -> int:
        deadline = time.monotonic() + _OTHERS_S
        while True:
            try:
                return socket.send_fds(self._end, [frame], fds)
            except OSError as error:
                # Another sandbox of this user has filled its sockets with descriptors (unix(7), ETOOMANYREFS). Its own
                # supervisor ends it for that.
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def hand_over(self, message: IpcMessage, fds: Sequence[int]) -> None:
        """Send a message with descriptors, and close these here."""
        # Also after a failed send: a descriptor that stays open here would keep the proxy's copy from ever seeing its
        # end.
        try:
            self.send(message, fds=fds)
        finally:
            close_all(fds)
