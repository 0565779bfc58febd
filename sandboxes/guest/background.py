"""Processes that were left running, by the names that they were started under. Seen from pid 1 or a keeper.

What they say is kept until somebody takes it; who takes it is told in which order it came on each stream, and of their
end when all of it was taken. Until then they are part of the sandbox's state.
"""

import base64
import contextlib
import fcntl
import json
import math
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandboxes.process_output import END, ERR, LINGER_S, MEDIA_TYPE, OUT, frame

ProcessAnswer = tuple[int, str, bytes]
"""Status, media type and body of an answer."""
_CHUNK = 1 << 16
_SESSION = 0x5429
"""TIOCGSID, which Python 3.11 has no name for: whose session a terminal is."""
DYING_S = 0.2
"""How long one that was just ended is given to be gone."""
LOOK_S = 1.0
"""Between calls, how often who keeps processes looks at them at least."""
WRITE_S = 10.0
"""How long a process may take to read what is written to it."""


class Kept:
    """One stream: what has come of it and nobody has taken. It keeps limit bytes, and counts what comes then."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.data = bytearray()
        self.dropped = 0

    def drain(self, limit: int) -> None:
        """Take what is there without waiting."""
        while self.fd >= 0:
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            room = max(0, limit - len(self.data))
            self.data += data[:room]
            self.dropped += max(0, len(data) - room)

    def take(self, size: int | None) -> bytes:
        """Return what has come, at most size bytes; without one all of it, with a last line on what was not kept."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        if size is None and self.dropped:
            taken += b"\n[forkpoint: %d more bytes left out]\n" % self.dropped
            self.dropped = 0
        return taken

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Left:
    """One. told: what it was started with. ends: our ends of its streams, by their places.

    until: when its time is up, and it alone is ended, as E2B's server does; by `time.monotonic`.
    death: readable when it has ended. pid: as this process knows it. status: tells its exit code once it has ended.
    """

    def __init__(
        self, told: Mapping[str, Any], ends: Mapping[int, int], death: int, pid: int, status: Callable[[], int]
    ) -> None:
        self.told, self.pid = dict(told), pid
        self.terminal, self.watches = bool(told.get("tty")), "argv" not in told
        self.stdin = ends.get(0, -1)
        self.streams = {place: Kept(ends.get(place, -1)) for place in (OUT, ERR)}
        self.code: int | None = None
        self.signals: set[int] = set()
        self.until = math.inf
        self._death, self._status = death, status
        self._ended_at = 0.0

    def await_death(self) -> None:
        """Give it the moment that it takes to die: who killed it and looks finds it gone."""
        select.select([self._death], [], [], DYING_S)

    def drain(self, limit: int) -> None:
        """Take what it has said, and end it if its time is up."""
        if self.code is None and time.monotonic() > self.until and not select.select([self._death], [], [], 0)[0]:
            self.until = math.inf
            self.signal(signal.SIGKILL)
        for stream in self.streams.values():
            stream.drain(limit)

    def look(self, limit: int) -> None:
        """Take what it has said, and note its end, which the anchor tells: never while a dump may hold that still."""
        overdue = time.monotonic() > self.until
        self.drain(limit)
        if self.code is None and select.select([self._death], [], [], DYING_S if overdue else 0)[0]:
            self.code, self._ended_at = self._status(), time.monotonic()
            self.drain(limit)
        if self.code is not None and time.monotonic() - self._ended_at > LINGER_S:
            # What it left behind holds its streams.
            for stream in self.streams.values():
                stream.close()

    @property
    def over(self) -> bool:
        """Whether it has ended, and said all that it will."""
        return self.code is not None and all(stream.fd < 0 for stream in self.streams.values())

    def take(self, due: Mapping[int, int] | None) -> bytes:
        """Return frames of what it has said; of each stream no more than is due."""
        said = b""
        for place, stream in self.streams.items():
            data = stream.take(None if due is None else due[place])
            said += frame(place, data) if data else b""
        return said

    def ending(self) -> dict[str, Any]:
        """Return what the last frame of an answer tells."""
        code = self.code if self.over and not any(stream.data for stream in self.streams.values()) else None
        number = 0 if code is None else code - 128
        told = {"exit_code": code, "timed_out": False, "truncated": False}
        return {**told, "signal": number} if number in self.signals else told

    def write(self, data: bytes, limit: int, *, typed: bool) -> str:
        """Write to its stdin, or typed at its terminal; return why that is not possible, or nothing."""
        if typed != self.terminal:
            return "it has a terminal: what it reads is typed there" if self.terminal else "it has no terminal"
        view, deadline = memoryview(data), time.monotonic() + WRITE_S
        to = self.streams[OUT].fd if self.terminal else self.stdin
        if to < 0:
            return "its stdin is closed"
        while view:
            try:
                view = view[os.write(to, view) :]
            except BlockingIOError:
                # It may wait for us to take what it says.
                self.look(limit)
                if time.monotonic() > deadline:
                    return "it does not read its stdin"
                select.select([], [to], [], 0.05)
            except OSError:
                return "it has closed its stdin"
        return ""

    def shut(self) -> str:
        """Close its stdin; return why that is not possible, or nothing."""
        if self.terminal:
            return "it has a terminal, whose end is typed: Ctrl+D (0x04)"
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        return ""

    def resize(self, size: Sequence[int]) -> str:
        """Give its terminal so many rows and columns; return why that is not possible, or nothing."""
        if not self.terminal:
            return "it has no terminal"
        # Nobody has a terminal open any more whose process has ended.
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.streams[OUT].fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        return ""

    def signal(self, number: int) -> None:
        """Send it a signal; of a terminal's processes, to the one whose session it is."""
        self.signals.add(number)
        pid = self.pid
        if self.terminal:
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(self.streams[OUT].fd, _SESSION, struct.pack("i", 0))
                pid = struct.unpack("i", told)[0] or pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def close(self) -> None:
        """Let go of it."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        for stream in self.streams.values():
            stream.close()
        if self._death >= 0:
            os.close(self._death)
            self._death = -1

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of this side: where its streams are, and the kernel's names of them."""
        ends = {place: stream.fd for place, stream in self.streams.items()} | {0: self.stdin}
        open_ends = {place: fd for place, fd in sorted(ends.items()) if fd >= 0}
        return {
            "told": self.told, "pid": self.pid, "code": self.code, "signals": sorted(self.signals),
            "places": list(open_ends), "left_s": None if self.until == math.inf else self.until - time.monotonic(),
            "pipes": [os.readlink(f"/proc/self/fd/{fd}") for fd in open_ends.values()],  # noqa: PTH115
            "kept": {str(place): base64.b64encode(stream.data).decode() for place, stream in self.streams.items()},
        }  # fmt: skip

    def recall(self, remembered: Mapping[str, Any]) -> None:
        """Know again what was remembered."""
        self.code, self.signals = remembered["code"], set(remembered["signals"])
        left_s = remembered.get("left_s")
        self.until = math.inf if left_s is None else time.monotonic() + left_s
        for place, data in remembered["kept"].items():
            self.streams[int(place)].data[:] = base64.b64decode(data)


class AllLeft:
    """Those of one sandbox. limit: bytes kept of each stream."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._processes: dict[int, Left] = {}

    def __iter__(self) -> Any:
        return iter(list(self._processes.values()))

    def add(self, process: Left) -> None:
        """Take one over."""
        self._processes[process.told["process"]] = process

    @property
    def outputs(self) -> dict[int, Kept]:
        """Their streams by descriptor, for who drains them."""
        return {s.fd: s for process in self for s in process.streams.values() if s.fd >= 0}

    def drop(self, name: int) -> bool:
        """Let go of a watch; False where there is none."""
        watch = self._processes.get(name)
        if watch is None or not watch.watches:
            return False
        watch.close()
        del self._processes[name]
        return True

    @property
    def within_ms(self) -> int:
        """How soon they are to be looked at: at least every second, and when the time of one is up."""
        left_s = min((process.until for process in self), default=math.inf) - time.monotonic()
        return max(1, math.ceil(1000 * min(LOOK_S, left_s)))

    @property
    def outside(self) -> str:
        """Say what of them is outside of what a checkpoint holds: the kernel's half of a terminal, or of a watch."""
        if any(process.terminal for process in self):
            return "a terminal is open, and a checkpoint does not hold it"
        if any(process.watches for process in self):
            return "a directory is watched, and a checkpoint does not hold that"
        return ""

    @property
    def state(self) -> set[tuple[Any, ...]]:
        """What of them is part of the sandbox's state."""
        return {("left", name) for name in self._processes}

    def drain(self) -> None:
        """Take what all have said, so that they do not wait for us. Between calls, when a dump may be under way."""
        for process in self:
            process.drain(self.limit)

    def look(self) -> None:
        """The same during a call; who has ended is noted."""
        for process in self:
            process.look(self.limit)

    def perform(self, fields: Mapping[str, Any], body: bytes) -> ProcessAnswer:
        """Do what a call asks for: `list`, or with a process `attend`, `write`, `close`, `resize` or `signal`."""
        self.look()
        tool, arguments = fields["tool"], fields["arguments"]
        if tool == "list":
            alive = [process.told for process in self if process.code is None and not process.watches]
            return 200, "application/json", json.dumps(sorted(alive, key=lambda told: int(told["process"]))).encode()
        process = self._processes.get(arguments["process"])
        if process is None or ((process.code is not None or process.watches) and tool != "attend"):
            return 404, "text/plain", f"there is no process {arguments['process']}".encode()
        why = ""
        match tool:
            case "attend":
                return self._attend(process, arguments.get("until"), fields["timeout_s"])
            case "write":
                why = process.write(body, self.limit, typed=bool(arguments.get("typed")))
            case "close":
                why = process.shut()
            case "resize":
                why = process.resize(arguments["size"])
            case "signal":
                process.signal(arguments["signal"])
                if arguments["signal"] == signal.SIGKILL:
                    process.await_death()
        return (409, "text/plain", why.encode()) if why else (200, "application/json", b"{}")

    def _attend(self, process: Left, until: Mapping[str, Any] | None, timeout_s: float) -> ProcessAnswer:
        """Tell what a process has said; with until, wait for as much and no more, or for its end."""
        due = None
        if until is not None:
            due = {place: int(until[str(place)]) for place in (OUT, ERR)}
            self._await(process, due, ended=until["ended"], timeout_s=timeout_s)
        said = process.take(due)
        told = process.ending()
        if told["exit_code"] is not None:
            process.close()
            del self._processes[process.told["process"]]
        return 200, MEDIA_TYPE, said + frame(END, json.dumps(told).encode())

    def _await(self, process: Left, due: Mapping[int, int], *, ended: bool, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not process.over:
            enough = all(len(process.streams[place].data) >= size for place, size in due.items())
            if enough and not ended:
                return
            fds = [stream.fd for stream in process.streams.values() if stream.fd >= 0]
            select.select([*fds], [], [], 0.01 if ended else 0.05)
            process.look(self.limit)
