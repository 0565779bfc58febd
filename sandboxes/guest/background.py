"""Background processes, which go on after the call that started them, by the number that the call gave them."""

# Theory of operation.
#
# The supervisor holds the other ends of their pipes. It keeps what they print until a call polls it, and forgets a
# process when a poll has reported its exit code. Until then the process is part of the sandbox's state, even after it
# has ended: a restored sandbox must be able to answer the same polls.
#
# When and how the exit code is read matters. Only the anchor, the process's parent, can tell it, and CRIU may be
# holding the anchor still between two calls. So `drain`, which runs between calls, never asks; `look`, which runs
# during calls, does.

import base64
import contextlib
import fcntl
import json
import math
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sandboxes.ipc.messages import UseBackgroundProcess
from sandboxes.linux.descriptors import set_size
from sandboxes.process_output import END, ERR, LINGER_S, MEDIA_TYPE, OUT, KeptOutput, frame

ProcessAnswer = tuple[int, str, bytes]
"""Status, media type and body of an answer."""
_CHUNK = 1 << 16
"""How much is read at once: the size of a pipe."""
_TIOCGSID = 0x5429
"""Reads the session of a terminal; Python 3.11 has no name for it."""
DYING_S = 0.2
"""How long a killed process is given to end, an estimate. After that it is reported as running once more."""
LOOK_S = 1.0
"""The longest interval between two looks at background processes while no call runs. The value is an estimate."""
WRITE_S = 10.0
"""How long a process may take to read what is written to its stdin; an estimate."""


class PendingOutput(KeptOutput):
    """Output of one stream that was not polled yet. Our end of the pipe, `fd`, is -1 once it is closed."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd

    def drain(self, max_bytes: int) -> None:
        """Read without waiting, and keep at most max_bytes."""
        while self.fd >= 0:
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                # A terminal's master end fails with EIO once no process has the other end open.
                data = b""
            if not data:
                self.close()
                return
            # Reading goes on when the buffer is full: a process must not stop because no call polls it.
            self.add(data, max_bytes)

    def take_some(self, size: int) -> bytes:
        """Remove and return at most size bytes."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken

    def close(self) -> None:
        """Close our end of the pipe; what was read stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def pending_outputs(ends: Mapping[int, int]) -> dict[int, PendingOutput]:
    """Return the output streams of a process, by stream number, given our ends of its streams."""
    return {stream: PendingOutput(ends.get(stream, -1)) for stream in (OUT, ERR)}


class BackgroundProcess:
    """One process that goes on in the background, or the watch of a directory, which behaves like one."""

    def __init__(
        self,
        description: Mapping[str, Any],
        streams: dict[int, PendingOutput],
        stdin: int,
        death: int,
        pid: int,
        status: Callable[[], int],
    ) -> None:
        """Take over a process; `death` is a descriptor that is readable once it has ended."""
        # `description`: what it was started with: number, argv, environment and the rest of the call's arguments.
        # `streams`: its output, by stream number.
        # `stdin`: our end of its stdin; -1 if it has none or it is closed.
        self.description, self.pid, self.streams, self.stdin = dict(description), pid, streams, stdin
        # `terminal`: whether it has a terminal. Its master end is then both the OUT stream and the way to type.
        self.terminal, self.watches = bool(description.get("tty")), "argv" not in description
        self.code: int | None = None  # Its exit code; None until the supervisor knows that it has ended.
        self.signals: set[int] = set()  # The signals that calls have sent to it.
        self.until = math.inf  # When its time is up and it alone is killed, by `time.monotonic`.
        self._death, self._status = death, status
        self._ended_at = 0.0

    def await_death(self) -> None:
        """Wait a moment for a killed process to die, so that the next poll finds it gone."""
        # SIGKILL is sent asynchronously. Without this wait the next poll would depend on the machine's speed.
        select.select([self._death], [], [], DYING_S)

    def drain(self, max_bytes: int) -> None:
        """Take its output, and kill it if its time is up."""
        # Its time is up, and it is still running: only then is a signal sent, because a pid may be reused.
        if self.code is None and time.monotonic() > self.until and not select.select([self._death], [], [], 0)[0]:
            self.until = math.inf
            self.signal(signal.SIGKILL)
        for stream in self.streams.values():
            stream.drain(max_bytes)

    def look(self, max_bytes: int) -> None:
        """Take its output, and note whether it has ended. Only during a call: the anchor reports the exit code."""
        overdue = time.monotonic() > self.until
        self.drain(max_bytes)
        if self.code is None and select.select([self._death], [], [], DYING_S if overdue else 0)[0]:
            # Drained once more below: its last output may have come after the first read.
            self.code, self._ended_at = self._status(), time.monotonic()
            self.drain(max_bytes)
        # The same grace as in `process_io`, so that foreground and background processes report the same output.
        if self.code is not None and time.monotonic() - self._ended_at > LINGER_S:
            # Children that it left behind hold its streams open, and may do so for ever.
            for stream in self.streams.values():
                stream.close()

    @property
    def over(self) -> bool:
        """Whether it has ended and all its output has come."""
        return self.code is not None and all(stream.fd < 0 for stream in self.streams.values())

    def take(self, due: Mapping[int, int] | None) -> bytes:
        """Remove and return output as frames, of each stream at most as many bytes as are due; None for all."""
        frames = b""
        for number, stream in self.streams.items():
            data = stream.take() if due is None else stream.take_some(due[number])
            frames += frame(number, data) if data else b""
        return frames

    def ending(self) -> dict[str, Any]:
        """Return the content of an answer's last frame: the exit code, once all output was polled."""
        code = self.code if self.over and not any(stream.data for stream in self.streams.values()) else None
        number = 0 if code is None else code - 128
        facts = {"exit_code": code, "timed_out": False, "truncated": False}
        # 128 + n may also be an ordinary exit code. Only if a call has sent that signal is it reported as one.
        return {**facts, "signal": number} if number in self.signals else facts

    def write(self, data: bytes, max_bytes: int, *, typed: bool) -> str:
        """Write to its stdin or type at its terminal; return why that is not possible, or an empty text."""
        # Docker and E2B have different calls for stdin and terminals; a mix-up is the client's error.
        if typed != self.terminal:
            return "it has a terminal: what it reads is typed there" if self.terminal else "it has no terminal"
        view, deadline = memoryview(data), time.monotonic() + WRITE_S
        # A terminal has one descriptor for both directions (pty(7)).
        to = self.streams[OUT].fd if self.terminal else self.stdin
        if to < 0:
            return "its stdin is closed"
        while view:
            try:
                view = view[os.write(to, view) :]
            except BlockingIOError:
                # A filter such as `cat` stops reading while its own output pipe is full, so output is drained here.
                self.look(max_bytes)
                if time.monotonic() > deadline:
                    return "it does not read its stdin"
                select.select([], [to], [], 0.05)
            except OSError:
                return "it has closed its stdin"
        return ""

    def close_stdin(self) -> str:
        """Close its stdin; return why that is not possible, or an empty text."""
        if self.terminal:
            return "it has a terminal, whose end is typed: Ctrl+D (0x04)"
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        return ""

    def resize(self, size: Sequence[int]) -> str:
        """Set its terminal's rows and columns; return why that is not possible, or an empty text."""
        if not self.terminal:
            return "it has no terminal"
        # Fails harmlessly once the process has ended and no process has the terminal open.
        with contextlib.suppress(OSError):
            set_size(self.streams[OUT].fd, size[1], size[0])
        return ""

    def signal(self, number: int) -> None:
        """Send it a signal. On a terminal the leader of the terminal's session gets it."""
        self.signals.add(number)
        pid = self.pid
        if self.terminal:
            with contextlib.suppress(OSError):
                # The process may be a shell script that has started the leader in a new session.
                leader = fcntl.ioctl(self.streams[OUT].fd, _TIOCGSID, struct.pack("i", 0))
                pid = struct.unpack("i", leader)[0] or pid
        with contextlib.suppress(ProcessLookupError):
            # Callers have just seen that the process has not ended, and a pid is given away only after the parent has
            # waited for its process (wait(2)).
            os.kill(pid, number)

    def close(self) -> None:
        """Close all descriptors of it; the process itself is not touched."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        for stream in self.streams.values():
            stream.close()
        if self._death >= 0:
            os.close(self._death)
            self._death = -1

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: its output, and the kernel's names of its pipes. A disk format."""
        # Streams that are closed have no pipe that could be restored.
        ends = {number: stream.fd for number, stream in self.streams.items()} | {0: self.stdin}
        open_ends = {number: fd for number, fd in sorted(ends.items()) if fd >= 0}
        return {
            "told": self.description, "pid": self.pid, "code": self.code, "signals": sorted(self.signals),
            "places": list(open_ends), "left_s": None if self.until == math.inf else self.until - time.monotonic(),
            # A name such as `pipe:[4711]`, by which CRIU recognizes the pipe's other end (`inherit_fd`).
            "pipes": [os.readlink(f"/proc/self/fd/{fd}") for fd in open_ends.values()],  # noqa: PTH115
            "kept": {str(number): base64.b64encode(stream.data).decode() for number, stream in self.streams.items()},
        }  # fmt: skip

    def recall(self, remembered: Mapping[str, Any]) -> None:
        """Go on from what `remember` returned before the checkpoint."""
        self.code, self.signals = remembered["code"], set(remembered["signals"])
        remaining_s = remembered.get("left_s")
        # A monotonic clock means nothing on another machine or after a boot, so a checkpoint stores the time that
        # remains.
        self.until = math.inf if remaining_s is None else time.monotonic() + remaining_s
        for number, data in remembered["kept"].items():
            self.streams[int(number)].data[:] = base64.b64decode(data)


class BackgroundProcesses:
    """The background processes of one sandbox. At most `max_bytes` of the output of each stream are kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._processes: dict[int, BackgroundProcess] = {}

    def __iter__(self) -> Iterator[BackgroundProcess]:
        return iter(list(self._processes.values()))

    def add(self, process: BackgroundProcess) -> None:
        """Take a process over."""
        self._processes[process.description["process"]] = process

    def drop_watch(self, number: int) -> bool:
        """End the watch of a directory; return False if there is no such watch."""
        watch = self._processes.get(number)
        if watch is None or not watch.watches:
            return False
        # A watch has no process, so nothing has to be killed.
        watch.close()
        del self._processes[number]
        return True

    @property
    def outputs(self) -> dict[int, PendingOutput]:
        """Their open streams by descriptor."""
        return {s.fd: s for process in self for s in process.streams.values() if s.fd >= 0}

    @property
    def within_ms(self) -> int:
        """In how many milliseconds they must be looked at: in a second, or when the time of one is up."""
        remaining_s = min((process.until for process in self), default=math.inf) - time.monotonic()
        return max(1, math.ceil(1000 * min(LOOK_S, remaining_s)))

    @property
    def outside_checkpoint(self) -> str:
        """Why CRIU could not dump one of them; empty if it could."""
        # CRIU does not hold the kernel's half of a terminal or of an inotify watch, whose other half is in this
        # process.
        if any(process.terminal for process in self):
            return "a terminal is open, and a checkpoint does not hold it"
        if any(process.watches for process in self):
            return "a directory is watched, and a checkpoint does not hold that"
        return ""

    @property
    def state(self) -> set[tuple[Any, ...]]:
        """The members of the sandbox's state that stand for background processes."""
        # Only the numbers: output arrives at times of its own and must not change the digest of a state.
        return {("background", number) for number in self._processes}

    def drain(self) -> None:
        """Take their output between calls. Never asks for an exit code, because a dump may hold the anchor still."""
        for process in self:
            process.drain(self.max_bytes)

    def look(self) -> None:
        """Take their output during a call, and note which of them have ended."""
        for process in self:
            process.look(self.max_bytes)

    def perform(self, request: UseBackgroundProcess, body: bytes) -> ProcessAnswer:
        """Carry out `list`, `attend` (which is a poll), `write`, `close`, `resize` or `signal`."""
        self.look()
        tool, arguments = request.tool, request.arguments
        if tool == "list":
            # A process that has ended is not listed, although it can still be polled once.
            running = [process.description for process in self if process.code is None and not process.watches]
            running.sort(key=lambda description: int(description["process"]))
            return 200, "application/json", json.dumps(running).encode()
        process = self._processes.get(arguments["process"])
        if process is None or ((process.code is not None or process.watches) and tool != "attend"):
            return 404, "text/plain", f"there is no process {arguments['process']}".encode()
        problem = ""
        match tool:
            case "attend":
                return self._poll(process, arguments.get("until"), request.timeout_s)
            case "write":
                problem = process.write(body, self.max_bytes, typed=bool(arguments.get("typed")))
            case "close":
                problem = process.close_stdin()
            case "resize":
                problem = process.resize(arguments["size"])
            case "signal":
                process.signal(arguments["signal"])
                if arguments["signal"] == signal.SIGKILL:
                    process.await_death()
        return (409, "text/plain", problem.encode()) if problem else (200, "application/json", b"{}")

    def _poll(self, process: BackgroundProcess, until: Mapping[str, Any] | None, timeout_s: float) -> ProcessAnswer:
        """Return what a process has printed since the last poll."""
        # A replay waits, for at most timeout_s, until as much output has come as the recorded poll returned (`until`),
        # and until the process has ended if it had then. It returns no more.
        due = None
        if until is not None:
            # JSON has no integer keys.
            due = {number: int(until[str(number)]) for number in (OUT, ERR)}
            self._await_output(process, due, ended=until["ended"], timeout_s=timeout_s)
        output = process.take(due)
        ending = process.ending()
        # The exit code is reported once, with the last of the output; then the number is unknown.
        if ending["exit_code"] is not None:
            process.close()
            del self._processes[process.description["process"]]
        return 200, MEDIA_TYPE, output + frame(END, json.dumps(ending).encode())

    def _await_output(
        self, process: BackgroundProcess, due: Mapping[int, int], *, ended: bool, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not process.over:
            # A replay that read less than was recorded would leave output for a later poll.
            enough = all(len(process.streams[number].data) >= size for number, size in due.items())
            if enough and not ended:
                return
            fds = [stream.fd for stream in process.streams.values() if stream.fd >= 0]
            # The end of a process is not among these descriptors, so it is looked for more often while it is awaited.
            select.select([*fds], [], [], 0.01 if ended else 0.05)
            process.look(self.max_bytes)
