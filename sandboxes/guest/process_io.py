"""A process of its own while its call runs: input is written to it, its output goes to the proxy in frames."""

# Theory of operation.
#
# Three buffers are in play: the process's pipes, `_waiting` here, and the socket to the proxy. None may make another
# party wait for ever:
#
# 1. The proxy may read slowly. Then `_waiting` grows to `_HELD_BYTES`, and the process's pipes are no longer polled, so
#    that the process waits as it would for any slow reader.
# 2. The process may not read its stdin. So stdin is written only when `poll` says that there is room.
# 3. The process may have ended, but children that it left behind hold its pipes open. After `LINGER_S` they are not
#    waited for any more.
#
# For a replay, `due` says how much output of each stream was recorded before the client left the process. The pump then
# reads exactly as much and leaves the process at that point, so that later polls find what they found when recorded.

import contextlib
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandboxes.guest.files.disk_watch import WATCH_S, limit_note
from sandboxes.linux.descriptors import close_all, output_pipe, set_size
from sandboxes.process_output import ERR, LINGER_S, OUT, frame

_CHUNK = 1 << 16
"""How much is read or written at once: the size of a pipe."""
_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
"""Unlock a terminal's other end, and read its number; Python 3.11 has no names for them."""
TIMED_OUT, OVER_DISK = 124, 137
"""Exit codes of processes that were killed: as `timeout` reports them, and as a shell reports a SIGKILL."""
_HELD_BYTES = 1 << 20
"""How much output waits here for the proxy before the process's pipes are no longer read."""


class Running:
    """One process and its streams, from its start until it has ended or is left in the background."""

    def __init__(
        self,
        ends: Mapping[int, int],
        stdin: bytes,
        death: int,
        to: socket.socket,
        *,
        keeps_in: bool = False,
        due: dict[int, int] | None = None,
    ) -> None:
        """Take over a process that was started, with our ends of its streams; a terminal has stream 1 alone."""
        # With `keeps_in` its stdin stays open after what was written. `due` is how much output of each stream is
        # awaited until the process is left; None if it is not to be left.
        self._keeps_in, self._due = keeps_in, due
        self._death, self._to, self._unwritten = death, to, memoryview(stdin)
        self._outputs = {ends[stream]: stream for stream in (1, 2) if stream in ends}
        self._in = ends.get(0, -1)
        self._owns_in = 0 in ends
        if not self._owns_in and stdin:
            # Typed at a terminal: its one descriptor is read and written.
            self._in = ends[1]
        self._waiting = bytearray()
        self._has_printed = False
        # The supervisor has one thread: a proxy that reads slowly must not stop it from watching time and disk.
        to.setblocking(False)
        for fd in {*self._outputs, *([self._in] if self._in >= 0 else [])}:
            os.set_blocking(fd, False)
        self._close_in_if_done()

    @property
    def outputs(self) -> list[int]:
        """Our ends of the output streams that are still open."""
        return list(self._outputs)

    def pump(
        self,
        until: float,
        driver: int,
        deaths: int,
        over_disk: Callable[[], str | None],
        client_detached: Callable[[], bool],
        *,
        detach: bool,
    ) -> str:
        """Pass input and output on; return "ended", "timeout", "disk", "depth", "pids", "host" or "detached".

        `until` is by `time.monotonic`. `over_disk` is called again and again, and at once when `deaths` is readable;
        `client_detached` is called when `driver`, the proxy's socket, is readable. The streams of a process that was
        started detached lead nowhere, so the pump is over once they are closed, unless they reported that it could not
        start.
        """
        ended_at: float | None = None
        while True:
            now = time.monotonic()
            # First: what was started detached may have ended by now, which is not for its client to know.
            if detach and not (self._outputs or self._has_printed):
                return "detached"
            if ended_at is not None and (not self._outputs or now - ended_at > LINGER_S):
                return "ended"
            if self._due is not None and not any(self._due.values()):
                return "detached"
            if now > until and ended_at is None:
                return "timeout"
            within_s = WATCH_S if ended_at is not None else min(WATCH_S, max(0.001, until - now))
            events = self._poll((driver, deaths), within_s, watch_death=ended_at is None)
            if driver in events and client_detached():
                return "detached"
            self._pass_on(events)
            if ended_at is None and self._death in events:
                ended_at = time.monotonic()
            if (over := over_disk()) is not None:
                return over

    def conclude(self, ending: str, status: Callable[[], int], disk_bytes: int) -> int | None:
        """Close the streams and return the exit code; None for a process that goes on, whose output stays open."""
        code: int | None = None
        if ending == "ended":
            code = status()
        elif ending != "detached":
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            for fd in list(self._outputs):
                self._read(fd)
            if note := limit_note(ending, disk_bytes):
                self._waiting += frame(ERR, note)
        self._flush()
        self._close(keep_outputs=ending == "detached")
        return code

    def hand_over(self) -> tuple[dict[int, int], int]:
        """Return our ends of its streams, by stream number, and its death descriptor; the caller owns them now."""
        # Ownership moves as a whole, so that `_close` cannot close a descriptor of the background process.
        ends = {stream: fd for fd, stream in self._outputs.items()}
        if self._owns_in and self._in >= 0:
            ends[0] = self._in
        self._outputs, self._in = {}, -1
        death, self._death = self._death, -1
        return ends, death

    def _close(self, *, keep_outputs: bool) -> None:
        if self._owns_in and self._in >= 0:
            os.close(self._in)
        self._in = -1
        if not keep_outputs:
            close_all(self._outputs)
            self._outputs.clear()
        if self._death >= 0:
            os.close(self._death)

    def _poll(self, others: Sequence[int], within_s: float, *, watch_death: bool) -> dict[int, int]:
        """Wait for whatever can go on; each descriptor is registered only while its event would be acted on."""
        poll = select.poll()
        for fd in others:
            poll.register(fd, select.POLLIN | select.POLLRDHUP)
        if watch_death:
            poll.register(self._death, select.POLLIN)
        reads = len(self._waiting) < _HELD_BYTES
        if reads:
            for fd, stream in self._outputs.items():
                if self._due is None or self._due[stream]:
                    poll.register(fd, select.POLLIN)
        if self._waiting:
            poll.register(self._to, select.POLLOUT)
        if self._in >= 0 and (self._unwritten or not self._keeps_in):
            # A second registration replaces the first: a terminal is read and written by one descriptor.
            readable = select.POLLIN if self._in in self._outputs and reads else 0
            poll.register(self._in, select.POLLOUT | readable)
        return dict(poll.poll(within_s * 1000))

    def _pass_on(self, events: Mapping[int, int]) -> None:
        if self._in in events and events[self._in] & (select.POLLOUT | select.POLLERR | select.POLLHUP):
            self._write()
        for fd in [fd for fd in self._outputs if fd in events]:
            self._read(fd)
        if self._waiting:
            self._send()

    def _write(self) -> None:
        try:
            self._unwritten = self._unwritten[os.write(self._in, self._unwritten[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            # The process has closed its stdin: the rest of the input has no reader.
            self._unwritten = self._unwritten[:0]
        self._close_in_if_done()

    def _close_in_if_done(self) -> None:
        if self._in >= 0 and not self._unwritten and not self._keeps_in:
            if self._owns_in:
                os.close(self._in)
            self._in = -1

    def _read(self, fd: int) -> None:
        stream = self._outputs[fd]
        # Not one byte more than is due: what is left in the pipe belongs to the next poll.
        room = _CHUNK if self._due is None else min(_CHUNK, self._due[stream])
        if not room:
            return
        try:
            data = os.read(fd, room)
        except BlockingIOError:
            return
        except OSError:
            # EIO: no process has the terminal open any more.
            data = b""
        if data:
            self._has_printed = True
            self._waiting += frame(OUT if stream == 1 else ERR, data)
            if self._due is not None:
                self._due[stream] -= len(data)
            return
        del self._outputs[fd]
        if fd == self._in:
            self._in = -1
        os.close(fd)

    def _send(self) -> None:
        try:
            sent = self._to.send(self._waiting)
        except BlockingIOError:
            return
        except OSError:
            # The proxy has closed its end of this socket: the output has no reader.
            sent = len(self._waiting)
        del self._waiting[:sent]

    def _flush(self) -> None:
        self._to.setblocking(True)
        with contextlib.suppress(OSError):
            self._to.sendall(self._waiting)
        self._waiting.clear()


def due_of(arguments: Mapping[str, Any]) -> dict[int, int] | None:
    """Return how much output of each stream is awaited until a process is left; None if it is not to be left."""
    until = arguments.get("until")
    return None if until is None else {stream: int(until[str(stream)]) for stream in (OUT, ERR)}


def new_pipes(*, stdin: bool) -> tuple[dict[int, int], dict[int, int]]:
    """Return our ends and a process's ends of its streams, by number. Without stdin it reads /dev/null."""
    ours, theirs = {}, {}
    for stream in (1, 2):
        ours[stream], theirs[stream] = output_pipe()
    if stdin:
        theirs[0], ours[0] = os.pipe2(os.O_CLOEXEC)
        os.fchmod(theirs[0], 0o666)
    else:
        theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    return ours, theirs


def open_terminal(multiplexer: str, size: object) -> tuple[int, str]:
    """Return the master end of a new terminal of a `ptmx` device, and the path of its other end."""
    # The size is its rows and columns; anything else leaves it unset.
    master = os.open(multiplexer, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, struct.pack("i", 0)))[0]
    if isinstance(size, list | tuple) and len(size) == 2:
        set_size(master, size[1], size[0])
    return master, f"/dev/pts/{number}"
