"""The program that carries a harness's requests to its model out of the sandbox, frame by frame.

Its text is what `python3 -c` runs in the sandbox, so it imports nothing of ours. It starts the harness, listens on the
loopback port that stands for the model, and carries the bytes of all connections over its stdin and stdout. It knows no
HTTP. A checkpoint holds it together with the harness, so that a request that waits for its response comes back too.

A frame is a header (`HEADER`) and as many bytes as it says: a connection's number, 0 for none, a kind, and a length.

- `d` bytes of a connection, in both directions
- `e` the connection has ended, or is to end once all of its bytes are sent
- `s` start the harness (to the relay): its `command` and what its `env` has beyond the relay's, as JSON
- `g` go on (to the relay); it begins to carry bytes out
- `p` pause (to the relay), and that it does (from it): no frame follows until `g`, so nothing is in the pipe between
  two turns
- `x` the harness has ended: its exit code, a line break, and the end of what it has printed
"""

import contextlib
import json
import os
import select
import selectors
import socket
import struct
import subprocess
import sys

HEADER = struct.Struct("!IcI")
_CHUNK_BYTES = 1 << 16
_LOG_BYTES = 1 << 16


class HarnessRelay:
    """The connections of one harness."""

    def __init__(self, port: int, log: str) -> None:
        self._log = log
        self._harness: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._unsent: dict[int, bytearray] = {}
        self._ending: set[int] = set()
        self._known, self._told = 0, False
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._listener.setblocking(False)

    def serve(self) -> None:
        """Carry frames until the proxy's end is closed."""
        while True:
            # Between turns connections are accepted and not read: no checkpoint holds one that waits to be accepted.
            while 0 not in select.select([0, self._listener.fileno()], [], [])[0]:
                self._accept()
            number, kind, data = _read_frame()
            if kind == b"s":
                self._start(**json.loads(data))
            elif kind == b"g":
                self._carry()
            else:
                self._take(number, kind, data)

    def _start(self, command: str, env: dict[str, str]) -> None:
        with open(self._log, "ab") as log:  # noqa: PTH123
            self._harness = subprocess.Popen(  # noqa: S603 - the command is the user's
                ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | env
            )

    def _carry(self) -> None:
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Signals do not wake it: the end of the harness is seen a moment later.
        while True:
            self._tell_end()
            self._watch()
            for key, _ in self._selector.select(0.05):
                if key.fd == 0:
                    number, kind, data = _read_frame()
                    if kind == b"p":
                        self._pause()
                        return
                    self._take(number, kind, data)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:
                    self._read(key.data)
            for number in list(self._connections):
                self._send(number)

    def _accept(self) -> None:
        # It may have been given up meanwhile.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._known += 1
            self._connections[self._known], self._unsent[self._known] = connection, bytearray()

    def _take(self, number: int, kind: bytes, data: bytes) -> None:
        if kind == b"d" and number in self._unsent:
            self._unsent[number] += data
        elif kind == b"e" and number in self._connections:
            self._ending.add(number)

    def _watch(self) -> None:
        for number, connection in self._connections.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent[number] else 0)
            if connection.fileno() in self._selector.get_map():
                self._selector.modify(connection, events, number)
            else:
                self._selector.register(connection, events, number)

    def _pause(self) -> None:
        for number in list(self._connections):
            self._send(number)
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        _write_frame(0, b"p")
        if self._told:
            # Nothing of the harness is left to carry, and without this process its state may be one of files alone.
            sys.exit(0)

    def _read(self, number: int) -> None:
        try:
            data = self._connections[number].recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            _write_frame(number, b"d", data)
        else:
            self._forget(number)
            _write_frame(number, b"e")

    def _send(self, number: int) -> None:
        connection, unsent = self._connections[number], self._unsent[number]
        try:
            while unsent:
                del unsent[: connection.send(unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._forget(number)
            _write_frame(number, b"e")
            return
        if number in self._ending:
            # The other end reads all that was sent, and then the end.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            self._forget(number)

    def _forget(self, number: int) -> None:
        connection = self._connections.pop(number)
        del self._unsent[number]
        self._ending.discard(number)
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()

    def _tell_end(self) -> None:
        if self._harness is None or self._told or (code := self._harness.poll()) is None:
            return
        self._told = True
        with open(self._log, "rb") as log:  # noqa: PTH123
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            _write_frame(0, b"x", b"%d\n" % code + log.read(_LOG_BYTES))


def _read_frame() -> tuple[int, bytes, bytes]:
    number, kind, length = HEADER.unpack(_read(HEADER.size))
    return number, kind, _read(length)


def _read(length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            # The proxy's end is closed, which it is when the sandbox ends.
            sys.exit(0)
        data += part
    return data


def _write_frame(number: int, kind: bytes, data: bytes = b"") -> None:
    rest = HEADER.pack(number, kind, len(data)) + data
    while rest:
        rest = rest[os.write(1, rest) :]


if __name__ == "__main__":
    HarnessRelay(int(sys.argv[1]), sys.argv[2]).serve()
