"""The tool servers of a sandbox, as its supervisor sees them: started under the anchor, reached over loopback."""

# Theory of operation.
#
# A server is started when a call needs it, or for the root state. It is ready when its port takes connections, or when
# its health path answers. Servers that talk over stdin and stdout (MCP) are ready at once; the pipes stay open here, so
# that they outlive the connection of each call.
#
# The supervisor never reads a server's answers. It hands the proxy a descriptor and waits for the proxy to say that the
# answer has come.

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.background import PendingOutput
from sandboxes.guest.shells import Shells
from sandboxes.guest.users import ROOT
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.linux import processes
from sandboxes.linux.descriptors import Opened, close_all, output_pipe, read_available, write_out
from sandboxes.linux.processes import death_of
from sandboxes.shell_text import BECOME_AGENT, quote

TAIL_BYTES = 1 << 14
"""How much of a server's log is kept, from its end. It is only quoted in errors."""
POLL_S = 0.01
"""The interval between two tries to connect while a server starts."""
CONNECT_S = 5.0
"""How long one connection attempt may take. Loopback connects at once unless the server's backlog is full. The value is
an estimate."""
_CHECK_S = 0.2
"""The pause between two health checks of a service that starts. The value is an estimate."""
_CHUNKS = 16
"""How many reads of a log follow each other. A server that prints without end must not keep the supervisor."""


class ToolServerError(Exception):
    """A server cannot be reached; its kind is "crashed" or "silent"."""

    def __init__(self, kind: Literal["crashed", "silent"], text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Log(PendingOutput):
    """The last of what a server prints, for errors. It is no part of any answer."""

    def drain(self, _max_bytes: int = 0) -> None:
        """Read without waiting; not to the end, if the server writes faster than this reads."""
        for _ in range(_CHUNKS if self.fd >= 0 else 0):
            data = read_available(self.fd)
            if not data:
                return
            self.data += data
            # Trimmed after each read, so a log takes at most the tail and one chunk of memory.
            del self.data[:-TAIL_BYTES]

    def tail(self) -> str:
        """Return the last lines."""
        self.drain()
        return bytes(self.data[-2000:]).decode(errors="replace").strip() or "it printed nothing"


class ServerProcess:
    """A server that was started."""

    def __init__(self, name: str, pid: int, log_fd: int, pipes: Sequence[int] = (), note: str = "") -> None:
        # `pid`: the command itself, which may have left the work to a child and ended.
        # `pipes`: our ends of its stdin and stdout, if it talks over them; empty otherwise.
        # `note`: what its next clients have to know of it, such as a session that was agreed on.
        self.name, self.pid, self.log, self.pipes, self.note = name, pid, Log(log_fd), tuple(pipes), note
        try:
            # A pidfd cannot come to mean another process. None stands for a process that had ended already.
            self._death: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._death = None

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        if self._death is None:
            return True
        return bool(select.select([self._death], [], [], 0)[0])

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, with the kernel's names of the pipes that lead to it. A disk format."""
        ours = [*self.pipes, *([self.log.fd] if self.log.fd >= 0 else [])]
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in ours]  # noqa: PTH115
        return {"name": self.name, "pid": self.pid, "pipes": names, "talks": bool(self.pipes), "note": self.note}

    def close(self) -> None:
        """Close all descriptors of it; the process itself is not touched."""
        self.log.close()
        close_all((*self.pipes, *([] if self._death is None else [self._death])))
        self.pipes, self._death = (), None


class Servers:
    """The tool servers of one sandbox, by name: children of the anchor. The proxy's orders say what a server is."""

    def __init__(self, shells: Shells) -> None:
        self._shells = shells
        self._servers: dict[str, ServerProcess] = {}

    def __iter__(self) -> Iterator[ServerProcess]:
        return iter(list(self._servers.values()))

    @property
    def outputs(self) -> dict[int, Log]:
        """Their open logs by descriptor."""
        return {server.log.fd: server.log for server in self if server.log.fd >= 0}

    def start(self, order: ServerOrder, watch: Callable[[], None]) -> None:
        """Start a server or a side service, and wait until it is ready; see `connect`."""
        if order.health is None:
            close_all(self.connect(order, watch)[0])
            return
        if order.port is not None and is_open(order.port):
            raise ToolServerError("crashed", f"{order.name}: another service has port {order.port} already")
        self._start(order)
        if order.port is not None:
            self._await_ready(order, order.port, watch).close()
        else:
            self._await_health(order, watch)

    def connect(self, order: ServerOrder, watch: Callable[[], None], first: bytes = b"") -> tuple[list[int], bool]:
        """Return descriptors that lead to a server, and whether the server was started for that."""
        # The server behind it is started first, and `first` is written to it at once. The descriptors are one
        # connection to its port, or its stdin and stdout; the caller closes them.
        fds, fresh = self._connect(order, watch)
        # A server that hangs up without reading has its reason in its answer, which the proxy reads.
        with contextlib.suppress(OSError):
            write_out(fds[0], first)
        return fds, fresh

    def _connect(self, order: ServerOrder, watch: Callable[[], None]) -> tuple[list[int], bool]:
        # The port is tried first: whatever listens there is the server, even if a process of another name started it.
        # No cache of connections: a call gets its own, so that no server sees requests of two calls on one connection.
        connection = None if order.port is None else _connected(order.port)
        if connection is not None:
            return [connection.detach()], False
        known = self._servers.get(order.name)
        fresh = known is None or known.ended
        if fresh:
            if order.behind is not None:
                self.start(with_members(order.behind, environment=order.environment), watch)
            self._start(order)
        if order.port is None:
            # Copies: the proxy closes its own at the end of the call, and the pipes must outlive that.
            return [os.dup(fd) for fd in self._servers[order.name].pipes], fresh
        return [self._await_ready(order, order.port, watch).detach()], fresh

    def note(self, name: str) -> str:
        """Return what was noted about a server since it was started; empty if nothing was."""
        return self._servers[name].note if name in self._servers else ""

    def take_note(self, name: str, note: str) -> None:
        """Note what a server's next clients have to know of it."""
        if name in self._servers:
            self._servers[name].note = note

    def log(self, name: str) -> str:
        """Return the last lines that a server printed; empty if there is no such server."""
        return self._servers[name].log.tail() if name in self._servers else ""

    def close_log(self, fd: int) -> None:
        """Close a log that no process writes to any more."""
        for server in self:
            if server.log.fd == fd:
                server.log.close()

    def drain_detached(self, fd: int, pid: int) -> None:
        """Drain the output of a process that its client has left as if it were a server's log."""
        # So a checkpoint also holds its pipe.

        # A key that no server in a spec can collide with by accident; the pair is unique while the descriptor is open.
        name = f"left {pid} {fd}"
        self._servers[name] = ServerProcess(name, pid, fd)

    def adopt(self, remembered: list[dict[str, Any]], ends: list[int]) -> None:
        """Take over the servers of a checkpoint, with our ends of all their pipes in the remembered order."""
        # CRIU was given the pipes in the same order (`ipc.inherited`).
        remaining = iter(ends)
        for server in remembered:
            ours = [next(remaining) for _ in server["pipes"]]
            pipes = ours[:2] if server["talks"] else []
            log = ours[-1] if len(ours) > len(pipes) else -1
            self._servers[server["name"]] = ServerProcess(server["name"], server["pid"], log, pipes, server["note"])

    def _start(self, order: ServerOrder) -> None:
        talks = order.port is None and order.health is None
        ours, theirs = new_pipes(talks=talks)
        # A server on a port gets an empty stdin, because its requests come over the network.
        null = [] if talks else [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)]
        # A server that does not talk over stdin and stdout prints both streams to its log.
        streams = dict(enumerate(theirs if talks else [*null, theirs[0], theirs[0]]))
        try:
            # A service changes its root and its user itself (`service_commands`).
            user = ROOT if order.health is not None else self._shells.user
            pid = self._shells.launch({**user.variables, **order.environment}, streams, _program(order), user)
        except ShellStartError as error:
            close_all(ours)
            raise ToolServerError("crashed", str(error)) from error
        finally:
            close_all((*theirs, *null))
        # The ended server of that name keeps its log until another one has started.
        before = self._servers.pop(order.name, None)
        if before is not None:
            before.close()
        self._servers[order.name] = ServerProcess(order.name, pid, ours[-1], ours[:-1])

    def _is_over(self, server: ServerProcess) -> bool:
        # A command that ends with 0 may have left a daemon behind, which opens the port later.
        others = {pid for pid, _ in processes.list_processes()} - self._shells.idle_pids
        return self._shells.status_of(server.pid) != 0 or not others

    def _await_ready(self, order: ServerOrder, port: int, watch: Callable[[], None]) -> socket.socket:
        server, deadline = self._servers[order.name], time.monotonic() + order.ready_s
        while time.monotonic() < deadline:
            watch()
            server.log.drain()
            # Read before the port is tried: a server that has ended by now opens its port no more, unless a child does.
            gone = server.ended
            connection = _connected(port)
            if connection is not None:
                if order.ready == "tcp":
                    return connection
                # The health check uses up a connection; the call gets a fresh one.
                with connection:
                    ready = _answers(connection, order.ready, deadline)
                if ready and (again := _connected(port)) is not None:
                    return again
            elif gone and self._is_over(server):
                raise ToolServerError(
                    "crashed", f"server {server.name!r} ended when it was started: {server.log.tail()}"
                )
            # The kernel has no event for "a port is listened on", so the port is tried again and again.
            time.sleep(POLL_S)
        raise ToolServerError(
            "silent",
            f"server {server.name!r} was not ready on port {port} within {order.ready_s:g} s: {server.log.tail()}",
        )

    def _await_health(self, order: ServerOrder, watch: Callable[[], None]) -> None:
        server, deadline, check = self._servers[order.name], time.monotonic() + order.ready_s, Log(-1)
        while time.monotonic() < deadline:
            server.log.drain()
            # Read before the check: what has ended by now is not healthy, whatever its check says.
            if server.ended:
                raise ToolServerError("crashed", f"{order.name} ended when it was started: {server.log.tail()}")
            healthy, check = self._check(order, deadline, watch)
            if healthy:
                return
            time.sleep(_CHECK_S)
        text = f"its check printed: {check.tail()}\nit printed: {server.log.tail()}"
        raise ToolServerError("silent", f"{order.name} was not healthy within {order.ready_s:g} s; {text}")

    def _check(self, order: ServerOrder, deadline: float, watch: Callable[[], None]) -> tuple[bool, Log]:
        ours, theirs = new_pipes(talks=False)
        streams = {0: os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 1: theirs[0], 2: theirs[0]}
        log = Log(ours[0])
        try:
            pid = self._shells.launch({}, streams, f"{BECOME_AGENT}; {order.health}", ROOT)
        except ShellStartError as error:
            raise ToolServerError("crashed", str(error)) from error
        finally:
            close_all((streams[0], *theirs))
        with Opened(death_of(pid)) as death:
            while not select.select([death], [], [], POLL_S)[0]:
                watch()
                log.drain()
                if time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(death, signal.SIGKILL)
        status = self._shells.status_of(pid)
        log.drain()
        log.close()
        return status == 0, log


def _connected(port: int) -> socket.socket | None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.ExitStack() as undo:
            try:
                connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.settimeout(CONNECT_S)
                connection.connect((address, port))
                # The descriptor goes to the proxy, which has time limits of its own.
                connection.settimeout(None)
            except OSError:
                continue
            # The connection leaves this block open; every failed attempt is closed by the stack.
            undo.pop_all()
            return connection
    return None


def is_open(port: int) -> bool:
    """Return whether a process listens on a port of this sandbox's loopback."""
    connection = _connected(port)
    if connection is not None:
        connection.close()
    return connection is not None


def _program(order: ServerOrder) -> str:
    change_folder = f"cd -- {quote(order.workdir)} || cd /"
    # In an image without bash its own shell runs it, because the server's program is the image's.
    shell = "s=/bin/sh; [ ! -x /bin/bash ] || s='/bin/bash --noprofile --norc'"
    become = f"exec $s -c {quote(order.command)}"
    return f"{BECOME_AGENT}; {change_folder}; {shell}; {become}"


def _answers(connection: socket.socket, path: str, deadline: float) -> bool:
    try:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        status = connection.recv(16).split(b" ")
    except OSError:
        return False
    # Any status below 500 counts: a server that answers 404 on its health path takes requests.
    return len(status) > 1 and status[0].startswith(b"HTTP/1.") and status[1][:3].isdigit() and int(status[1][:3]) < 500


def new_pipes(*, talks: bool) -> tuple[list[int], list[int]]:
    """Return our ends and a server's ends of its pipes: stdin and stdout if it talks over them, then its log."""
    ours, theirs = [], []
    if talks:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        ours.append(writing)
        theirs.append(reading)
    for _ in range(1 + talks):
        reading, writing = output_pipe()
        ours.append(reading)
        theirs.append(writing)
    return ours, theirs
