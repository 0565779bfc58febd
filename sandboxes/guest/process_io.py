"""A process of its own while it runs: input written, output passed on in frames. Seen from pid 1 or a keeper."""

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.guest.changes import WATCH_S
from sandboxes.process_output import ERR, LINGER_S, OUT, frame

_CHUNK = 1 << 16
_UNLOCK, _NUMBER = 0x40045431, 0x80045430
"""TIOCSPTLCK and TIOCGPTN, which Python 3.11 has no names for."""
TIMED_OUT, OVER_DISK = 124, 137
_HELD_BYTES = 1 << 20
"""Of output that waits for the driver; then the process's pipes are left alone until it has taken some."""


class Running:
    """One process. ends: our ends of its streams by their places, 0, 1 and 2; of a terminal 1 alone.

    death: readable when it has ended. to: where frames go. keeps_in: whether its stdin stays open after what is given.
    due: how much of its output, by place, has to come until it is left running; None: it is not for that.
    """

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
        self._keeps_in, self._due = keeps_in, due
        self._death, self._to, self._left = death, to, memoryview(stdin)
        self._outputs = {ends[place]: place for place in (1, 2) if place in ends}
        self._in = ends.get(0, -1)
        self._owns_in = 0 in ends
        if not self._owns_in and stdin:
            self._in = ends[1]
        self._waiting = bytearray()
        self._said = False
        to.setblocking(False)
        for fd in {*self._outputs, *([self._in] if self._in >= 0 else [])}:
            os.set_blocking(fd, False)
        self._close_in_if_done()

    @property
    def outputs(self) -> list[int]:
        """Our ends of the streams that somebody may still write to."""
        return list(self._outputs)

    def pump(
        self, until: float, driver: int, over_disk: Callable[[], str | None], mind: Callable[[], bool], *, detach: bool
    ) -> str:
        """Pass everything on until it ended and was read; return "ended", "timeout", "disk", "host", or "left".

        until: when its time is up. mind: called when driver can be read; whether the client has left. detach: it is
        over, "left", once the process has let go of its output without a word on why it could not start.
        """
        ended_at: float | None = None
        while True:
            now = time.monotonic()
            if ended_at is not None and (not self._outputs or now - ended_at > LINGER_S):
                return "ended"
            if (detach and not (self._outputs or self._said)) or self._has_come:
                return "left"
            if now > until and ended_at is None:
                return "timeout"
            within_s = WATCH_S if ended_at is not None else min(WATCH_S, max(0.001, until - now))
            events = self._poll(driver, within_s, watch_death=ended_at is None)
            if driver in events and mind():
                return "left"
            self._turn(events)
            if ended_at is None and self._death in events:
                ended_at = time.monotonic()
            if (over := over_disk()) is not None:
                return over

    def conclude(self, ending: str, status: Callable[[], int], disk_bytes: int) -> dict[str, Any]:
        """Say how it ended, and let go of its streams; those of one that was left go on, for who reads them.

        status: tells the exit code of one that has ended.
        """
        code: int | None = None
        if ending == "ended":
            code = status()
        elif ending != "left":
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            for fd in list(self._outputs):
                self._read(fd)
            if ending == "disk":
                note = f"\n[forkpoint: killed: the sandbox may hold {disk_bytes >> 20} MB of new files]\n"
                self._waiting += frame(ERR, note.encode())
        self._flush()
        self._close(keep=ending == "left")
        return {"exit_code": code, "timed_out": ending == "timeout", "host_full": ending == "host"}

    @property
    def _has_come(self) -> bool:
        """Whether all output that was due has come."""
        return self._due is not None and not any(self._due.values())

    def hand_over(self) -> tuple[dict[int, int], int]:
        """Return our ends of its streams, by their places, and its death: the caller's from now on."""
        ends = {place: fd for fd, place in self._outputs.items()}
        if self._owns_in and self._in >= 0:
            ends[0] = self._in
        self._outputs, self._in = {}, -1
        death, self._death = self._death, -1
        return ends, death

    def _close(self, *, keep: bool) -> None:
        if self._owns_in and self._in >= 0:
            os.close(self._in)
        self._in = -1
        if not keep:
            for fd in self._outputs:
                os.close(fd)
            self._outputs.clear()
        if self._death >= 0:
            os.close(self._death)

    def _poll(self, driver: int, within_s: float, *, watch_death: bool) -> dict[int, int]:
        poll = select.poll()
        poll.register(driver, select.POLLIN | select.POLLRDHUP)
        if watch_death:
            poll.register(self._death, select.POLLIN)
        if len(self._waiting) < _HELD_BYTES:
            for fd, place in self._outputs.items():
                if self._due is None or self._due[place]:
                    poll.register(fd, select.POLLIN)
        if self._waiting:
            poll.register(self._to, select.POLLOUT)
        if self._in >= 0 and (self._left or not self._keeps_in):
            readable = select.POLLIN if self._in in self._outputs and len(self._waiting) < _HELD_BYTES else 0
            poll.register(self._in, select.POLLOUT | readable)
        return dict(poll.poll(within_s * 1000))

    def _turn(self, events: Mapping[int, int]) -> None:
        if self._in in events and events[self._in] & (select.POLLOUT | select.POLLERR | select.POLLHUP):
            self._write()
        for fd in [fd for fd in self._outputs if fd in events]:
            self._read(fd)
        if self._waiting:
            self._pass_on()

    def _write(self) -> None:
        try:
            self._left = self._left[os.write(self._in, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            # It reads no more.
            self._left = self._left[:0]
        self._close_in_if_done()

    def _close_in_if_done(self) -> None:
        if self._in >= 0 and not self._left and not self._keeps_in:
            if self._owns_in:
                os.close(self._in)
            self._in = -1

    def _read(self, fd: int) -> None:
        place = self._outputs[fd]
        room = _CHUNK if self._due is None else min(_CHUNK, self._due[place])
        if not room:
            return
        try:
            data = os.read(fd, room)
        except BlockingIOError:
            return
        except OSError:
            # A terminal that nobody has open any more.
            data = b""
        if data:
            self._said = True
            self._waiting += frame(OUT if place == 1 else ERR, data)
            if self._due is not None:
                self._due[place] -= len(data)
            return
        del self._outputs[fd]
        if fd == self._in:
            self._in = -1
        os.close(fd)

    def _pass_on(self) -> None:
        try:
            sent = self._to.send(self._waiting)
        except BlockingIOError:
            return
        except OSError:
            # Nobody hears it any more.
            sent = len(self._waiting)
        del self._waiting[:sent]

    def _flush(self) -> None:
        self._to.setblocking(True)
        with contextlib.suppress(OSError):
            self._to.sendall(self._waiting)
        self._waiting.clear()


def due_of(asked: Mapping[str, Any]) -> dict[int, int] | None:
    """Return how much output is due of each stream before a process is left running; None where it is not for that."""
    until = asked.get("until")
    return None if until is None else {place: int(until[str(place)]) for place in (OUT, ERR)}


def death_of(pid: int) -> int:
    """Return a descriptor that is readable once this process has ended, which it may have by now."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)


def new_pipes(*, stdin: bool) -> tuple[dict[int, int], dict[int, int]]:
    """Return our ends and a process's ends of its streams, by their places; its stdin is /dev/null without stdin."""
    ours, theirs = {}, {}
    for place in (1, 2):
        ours[place], theirs[place] = os.pipe2(os.O_CLOEXEC)
        # Whoever it becomes may open /dev/stdout again, as whatever user.
        os.fchmod(theirs[place], 0o666)
    if stdin:
        theirs[0], ours[0] = os.pipe2(os.O_CLOEXEC)
        os.fchmod(theirs[0], 0o666)
    else:
        theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    return ours, theirs


def open_terminal(multiplexer: str, size: object) -> tuple[int, str]:
    """Return our end of a new terminal and the path of the other end, in the file system that multiplexer is of.

    size: rows and columns, where they are known.
    """
    master = os.open(multiplexer, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _UNLOCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(master, _NUMBER, struct.pack("i", 0)))[0]
    if isinstance(size, list | tuple) and len(size) == 2:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    return master, f"/dev/pts/{number}"


def failed(to: socket.socket, why: str) -> dict[str, Any]:
    """Say that a process could not be started."""
    with contextlib.suppress(OSError):
        to.sendall(frame(OUT, f"OCI runtime exec failed: {why}\r\n".encode()))
    return {"exit_code": 126, "timed_out": False}
