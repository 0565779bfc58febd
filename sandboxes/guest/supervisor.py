"""A sandbox's calls, run one at a time: what pid 1 of a local sandbox and a container's keeper do alike."""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sandboxes.guest import dir_watch as watching
from sandboxes.guest import file_ops as files
from sandboxes.guest.background import AllLeft, Kept
from sandboxes.guest.bash_session import MalformedDumpError
from sandboxes.guest.changes import WATCH_S, Stillness
from sandboxes.guest.shell import Output, Shell
from sandboxes.guest.shell_pool import Shells
from sandboxes.guest.survivors import Alive
from sandboxes.guest.tool_servers import Log, Servers, ToolServerError, hand_over, served
from sandboxes.ipc.frames import Inbox, Message, pack, receive
from sandboxes.linux import processes
from sandboxes.session_types import ShellSession

TIMED_OUT, OVER_DISK = 124, 137
Answered = tuple[dict[str, Any], bytes]
"""What a call's answer says of it, and its body."""


class Files(Protocol):
    """What a sandbox's files differ in from its root state; see `changes.Changes`."""

    disk_bytes: int
    reserve_bytes: int

    def look(self) -> bool: ...

    def state(self, told: dict[str, ShellSession], *, alive: bool) -> dict[str, Any]: ...

    def free_bytes(self) -> int: ...

    def disk_watch(self) -> Callable[[], str | None]: ...


def state_of(changes: Files, shells: Shells, alive: Alive, stillness: Stillness) -> dict[str, Any]:
    """Return what every answer tells of the state."""
    lives = bool(alive)
    return {**changes.state(shells.sessions, alive=lives), "restless": lives and stillness.restless}


class Supervisor:
    """That of one sandbox. Subclasses say what they have of it, and how what is theirs alone is done."""

    driver: socket.socket
    inbox: Inbox
    output_bytes: int
    shells: Shells
    servers: Servers
    left: AllLeft
    changes: Files
    alive: Alive
    stillness: Stillness

    # -- theirs ------------------------------------------------------------------------------------------------------

    @property
    def _watched(self) -> list[int]:
        """Descriptors that can be read when nobody is left to answer; see `_mind`."""
        return []

    def _mind(self, events: set[int]) -> None:
        """End where nobody waits for an answer any more, or nobody is left to give one."""
        if self.driver.fileno() in events:
            sys.exit(0)

    def _exec(self, fields: dict[str, Any], command: bytes) -> Answered:
        raise NotImplementedError

    def _process(self, fields: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        raise NotImplementedError

    def _become_user(self) -> None:
        """In a child that works on paths of the agent's: be able to do no more than the agent is."""

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return what a server is started with."""
        return order

    def _end_servers(self) -> None:
        """Kill all that lives but what starts others."""
        raise NotImplementedError

    def _let_go(self, shell: Shell, ending: str) -> None:
        """Forget a shell whose call did not end with a dump."""
        raise NotImplementedError

    def _answer_call(self, answer: dict[str, Any], body: bytes, touched: str | None) -> None:
        """Tell the driver, and get ready for the next call. touched: the session that it was in."""
        raise NotImplementedError

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next(self) -> Message | None:
        """Wait for a request; meanwhile take the output of what lives, so that it does not block."""
        while (message := self.inbox.take()) is None:
            if not self._listen(self._outputs if self.alive else {}, self.left.within_ms if self.alive else None):
                return None
            self.shells.reap()
            self.left.drain()
        return message

    @property
    def _outputs(self) -> dict[int, Output | Log | Kept]:
        """The streams of all that may live on between calls."""
        return {**self.shells.outputs, **self.servers.outputs, **self.left.outputs}

    def _listen(self, outputs: Mapping[int, Output | Log | Kept], within_ms: int | None = None) -> bool:
        """Wait for the driver, or for a second where outputs are to be drained; False where the driver is gone."""
        poll = select.poll()
        for fd in (self.driver.fileno(), *self._watched, *outputs):
            poll.register(fd, select.POLLIN)
        events = poll.poll(within_ms or (1000 if self.alive else None))
        self._mind({fd for fd, _ in events} - {self.driver.fileno()})
        for fd, event in events:
            if fd in outputs:
                outputs[fd].drain(self.output_bytes)
                if not event & select.POLLIN:
                    # Nobody writes there any more; polled again and again, it would keep this process busy.
                    self.servers.close_log(fd)
            elif fd == self.driver.fileno():
                return self._receive()
        return True

    def _receive(self) -> bool:
        data, fds = receive(self.driver)
        self.inbox.feed(data, fds)
        return bool(data)

    def _reply(self, fields: dict[str, Any], body: bytes = b"") -> None:
        self.driver.sendall(pack(fields, body))

    def _state(self) -> dict[str, Any]:
        return state_of(self.changes, self.shells, self.alive, self.stillness)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, message: Message) -> None:
        self.shells.reap()
        alive_before, free = self.alive.now, self.changes.free_bytes()
        turns_before = processes.run_counts(self.alive.processes)
        started = time.perf_counter()
        answer, body = self._perform(message)
        answer["seconds"] = time.perf_counter() - started
        changed, read = answer.pop("session_changed", False), answer.pop("read", False)
        self.alive.settle()
        # Whoever answers works: where its client's word is that it reads, only who lives is looked at.
        worked = not read and processes.ran_between(turns_before, processes.run_counts(self.alive.processes))
        came_or_went, wrote_files = self.alive.now != alive_before, self.changes.look()
        self.stillness.saw(wrote=wrote_files, moved=came_or_went)
        # A server of the spec's was waited for; others may be on their way for a while.
        awaited = answer.pop("awaited", False)
        answer["young"] = bool(self.alive) and came_or_went and not awaited
        effects = {"session": changed, "processes": worked or came_or_went, "files": wrote_files}
        if self.changes.free_bytes() < min(free, self.changes.reserve_bytes):
            answer["host_full"] = True
        touched = message.fields["session"] if message.fields["op"] == "exec" else None
        self._answer_call({**answer, **effects, **self._state()}, body, touched)

    def _perform(self, message: Message) -> Answered:
        fields = message.fields
        match fields["op"]:
            case "exec":
                return self._exec(fields, message.body)
            case "serve":
                return self._serve(self._order(fields["server"]), message.body), b""
            case "process":
                return self._process(fields, message.body), b""
            case "tend":
                status, media_type, body = watching.perform(self.left, fields, message.body, self._become_user)
                return {"status": status, "media_type": media_type}, body
            case _:
                return self._file(fields, message)

    def _wait(self, shell: Shell, timeout_s: float) -> str:
        """Wait for shell's dump; return "dump", "died", "timeout", "disk" or "host"."""
        deadline, over_disk = time.monotonic() + timeout_s, self._tending()
        poll = select.poll()
        outputs = {output.fd: output for output in (shell.out, shell.err)}
        for fd in (*outputs, shell.dump_fd, shell.death, *self._watched):
            poll.register(fd, select.POLLIN)
        poll.register(self.driver, select.POLLHUP | select.POLLRDHUP)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            events = {fd for fd, _ in poll.poll(max(1, min(left, WATCH_S) * 1000))}
            for fd in events & outputs.keys():
                outputs[fd].drain(self.output_bytes)
            self._mind(events)
            if shell.dump_fd in events and shell.read_dump():
                return "dump"
            if shell.death in events:
                return "died"
            if (over := over_disk()) is not None:
                return over

    def _conclude(self, shell: Shell, ending: str, kill: Callable[[], None]) -> Answered:
        """Return the answer of a command that ended so. kill: ends all that it started."""
        code, changed, notes = 0, False, b""
        if ending == "dump":
            try:
                code, changed = self.shells.take_dump(shell)
            except MalformedDumpError as error:
                ending, code = "malformed", 1
                notes = f"\n[forkpoint: the session stays as it was before this call: {error}]\n".encode()
        elif ending == "died":
            code = self.shells.status(shell)
        else:
            kill()
            code = TIMED_OUT if ending == "timeout" else OVER_DISK
            if ending == "disk":
                megabytes = self.changes.disk_bytes >> 20
                notes = f"\n[forkpoint: killed: the sandbox may hold {megabytes} MB of new files]\n".encode()
        for output in (shell.out, shell.err):
            output.drain(self.output_bytes)
        (out, out_cut), (err, err_cut) = shell.out.take(), shell.err.take()
        if ending != "dump":
            self._let_go(shell, ending)
        cut = out_cut or err_cut
        answer, body = told(code, out, err + notes, timed_out=ending == "timeout", truncated=cut)
        return {**answer, "session_changed": changed, "host_full": ending == "host"}, body

    def _file(self, fields: dict[str, Any], message: Message) -> Answered:
        """Run a file operation in a child; like a command's, its time and its memory are bounded."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        try:
            pid = os.fork()
        except OSError as error:
            # The sandbox has as many processes as it may have.
            for fd in (reading, writing, *message.fds):
                os.close(fd)
            why = f"no process for it: {error.strerror}"
            status, media_type, body = files.problem(507, "File operation failed", why)
            return {"status": status, "media_type": media_type}, body
        if pid == 0:
            self._operate(message, writing)
        for fd in (writing, *message.fds):
            os.close(fd)
        data, whole = self._read_all(reading, fields["timeout_s"])
        os.close(reading)
        # It alone, which starts nobody: what lives beside it may have started others meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return files.heard(data, whole=whole)

    def _operate(self, message: Message, result: int) -> None:
        """In the child. Never returns."""
        try:
            self._become_user()
            source = message.fds[0] if message.fds else None
            files.run_apart(message.fields["tool"], message.fields["arguments"], message.body, result, source)
        finally:
            os._exit(1)

    def _read_all(self, fd: int, timeout_s: float) -> tuple[bytes, bool]:
        output = Output(fd)
        deadline, over_disk = time.monotonic() + timeout_s, self._tending()
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while time.monotonic() < deadline and over_disk() is None:
            events = poll.poll(WATCH_S * 1000)
            output.drain(sys.maxsize)
            if events and events[0][1] & select.POLLHUP and not events[0][1] & select.POLLIN:
                return bytes(output.kept), True
        return bytes(output.kept), False

    def _client_left(self) -> bool:
        """Hear what the driver says during a call: that its client has left, or nothing ever again."""
        if not self._receive():
            sys.exit(0)
        message = self.inbox.take()
        return message is not None and message.fields["op"] == "leave"

    def _tending(self) -> Callable[[], str | None]:
        """Return what is to be called during a call: it says when the sandbox holds too much, see `disk_watch`.

        It takes the output of servers, and of what their clients left, so that these do not block meanwhile.
        """
        over_disk = self.changes.disk_watch()

        def tend() -> str | None:
            self.left.look()
            for log in self.servers.outputs.values():
                log.drain()
            return over_disk()

        return tend

    # -- servers -----------------------------------------------------------------------------------------------------

    def _start_servers(self, orders: list[dict[str, Any]]) -> None:
        """Start servers, as part of the root state."""
        try:
            for order in orders:
                for fd in self.servers.connect(self._order(order), self._watch())[0]:
                    os.close(fd)
        except ToolServerError as error:
            self._reply({"failed": error.kind, "detail": str(error)})
            return
        self.alive.settle()
        self.changes.look()
        self._reply({})

    def _serve(self, order: dict[str, Any], first: bytes) -> dict[str, Any]:
        """Give the driver a way to a server, on which first was sent, and wait until it has its answer."""
        watch = self._watch()
        while True:
            try:
                fresh = hand_over(self.driver, self.servers, order, watch, first)
            except ToolServerError as error:
                return {"failed": error.kind, "detail": str(error)}
            while (message := self.inbox.take()) is None:
                if not self._listen(self._outputs, int(WATCH_S * 1000)):
                    sys.exit(0)
                watch()
            if message.fields["op"] != "again":
                return {**served(self.servers, order, message), "awaited": fresh}
            first = b""

    def _watch(self) -> Callable[[], None]:
        """Return what ends the servers when the sandbox holds too much, and this process when nobody needs it."""
        over_disk = self._tending()
        poll = select.poll()
        poll.register(self.driver, select.POLLHUP | select.POLLRDHUP)
        for fd in self._watched:
            poll.register(fd, select.POLLIN)

        def look() -> None:
            self._mind({fd for fd, _ in poll.poll(0)})
            if over_disk() is not None:
                self._end_servers()

        return look


def told(code: int, out: bytes, err: bytes, *, timed_out: bool = False, truncated: bool = False) -> Answered:
    """Return what a command's answer says, and its streams (pure)."""
    lengths = {"stdout_bytes": len(out), "stderr_bytes": len(err)}
    return {"exit_code": code, "timed_out": timed_out, "truncated": truncated, **lengths}, out + err


def not_started(error: Exception) -> Answered:
    """Return the answer of a command whose shell does not start (pure)."""
    return told(127, b"", f"{error}\n".encode())
