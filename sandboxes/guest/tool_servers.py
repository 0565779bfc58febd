"""The tool servers of a sandbox: started under its anchor, reached over its own loopback. Seen from pid 1."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.shell_pool import Shells
from sandboxes.ipc.frames import Message, pack
from sandboxes.linux import processes
from sandboxes.shell_quote import quote

TAIL_BYTES = 1 << 14
POLL_S = 0.01
CONNECT_S = 5.0
_CHUNK, _CHUNKS = 1 << 16, 16


class ToolServerError(Exception):
    """A server is not there to be asked. `kind`: "crashed" or "silent"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Log:
    """What a server prints: the last of it is kept, for who asks why it failed. It is no part of any answer."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.kept = bytearray()

    def drain(self, _limit: int = 0) -> None:
        """Take what is there without waiting; not all of it, where somebody writes faster than this reads."""
        for _ in range(_CHUNKS if self.fd >= 0 else 0):
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                return
            self.kept += data
            del self.kept[:-TAIL_BYTES]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def tail(self) -> str:
        """Return the last lines."""
        self.drain()
        return bytes(self.kept[-2000:]).decode(errors="replace").strip() or "it printed nothing"


class ServerProcess:
    """One that was started. pid: of the command itself, which may have left the work to a child and ended.

    talk: our ends of its stdin and stdout, where it speaks over these. note: what its clients have to know of it.
    """

    def __init__(self, name: str, pid: int, log_fd: int, talk: Sequence[int] = (), note: str = "") -> None:
        self.note = note
        self.name, self.pid, self.log, self.talk = name, pid, Log(log_fd), tuple(talk)
        try:
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
        """Return what a checkpoint has to keep of this side; pipes: the kernel's names of those that lead to it.

        A log that was closed has none.
        """
        ours = [*self.talk, *([self.log.fd] if self.log.fd >= 0 else [])]
        pipes = [os.readlink(f"/proc/self/fd/{fd}") for fd in ours]  # noqa: PTH115
        return {"name": self.name, "pid": self.pid, "pipes": pipes, "talks": bool(self.talk), "note": self.note}

    def close(self) -> None:
        """Let go of it; it runs on where it runs."""
        self.log.close()
        for fd in (*self.talk, *([] if self._death is None else [self._death])):
            os.close(fd)
        self.talk, self._death = (), None


class Servers:
    """Those of one sandbox, by name. Orders are the driver's: what a server is told in them, it is each time."""

    def __init__(self, shells: Shells) -> None:
        self._shells = shells
        self._servers: dict[str, ServerProcess] = {}

    def __iter__(self) -> Iterator[ServerProcess]:
        return iter(list(self._servers.values()))

    @property
    def outputs(self) -> dict[int, Log]:
        """Their streams by descriptor, for who drains them."""
        return {server.log.fd: server.log for server in self if server.log.fd >= 0}

    def take_over(self, fd: int, pid: int) -> None:
        """From now on take the output of a process that its client has left; a checkpoint holds it as a server's."""
        name = f"left {pid} {fd}"
        self._servers[name] = ServerProcess(name, pid, fd)

    def connect(self, order: dict[str, Any], watch: Callable[[], None]) -> tuple[list[int], bool]:
        """Return descriptors that lead to the server that order names, and whether it was started for that.

        One of a connection to its port, or where it speaks over them, of its stdin and its stdout. One `behind` it is
        made ready before. watch: called now and then while it starts.

        Raises:
            ServerFailed: it ended, or did not get ready in time.
        """
        connection = None if order["port"] is None else _connected(order["port"])
        if connection is not None:
            return [connection.detach()], False
        known = self._servers.get(order["name"])
        fresh = known is None or known.ended
        if fresh:
            if "behind" in order:
                behind = {**order["behind"], "environment": order["environment"]}
                for fd in self.connect(behind, watch)[0]:
                    os.close(fd)
            self._start(order)
        if order["port"] is None:
            return [os.dup(fd) for fd in self._servers[order["name"]].talk], fresh
        return [self._await_ready(order, watch).detach()], fresh

    def note(self, name: str) -> str:
        """Return what was noted of a server, as long as its process lives; empty where nothing was."""
        return self._servers[name].note if name in self._servers else ""

    def take_note(self, name: str, note: str) -> None:
        """Note what a server's clients have to know of it from call to call."""
        if name in self._servers:
            self._servers[name].note = note

    def log(self, name: str) -> str:
        """Return the last that a server printed."""
        return self._servers[name].log.tail() if name in self._servers else ""

    def close_log(self, fd: int) -> None:
        """Let go of a log that nobody writes to any more."""
        for server in self:
            if server.log.fd == fd:
                server.log.close()

    def adopt(self, told: list[dict[str, Any]], ends: list[int]) -> None:
        """Take over those that a checkpoint brought back; ends: our ends of their pipes, in the order of `pipes`."""
        left = iter(ends)
        for server in told:
            ours = [next(left) for _ in server["pipes"]]
            talk = ours[:2] if server["talks"] else []
            log = ours[-1] if len(ours) > len(talk) else -1
            self._servers[server["name"]] = ServerProcess(server["name"], server["pid"], log, talk, server["note"])

    def _start(self, order: dict[str, Any]) -> None:
        talks = order["port"] is None
        ours, theirs = new_pipes(talks=talks)
        null = [] if talks else [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)]
        places = dict(enumerate(theirs if talks else [*null, theirs[0], theirs[0]]))
        try:
            pid = self._shells.launch(order["environment"], places, _program(order))
        except ShellStartError as error:
            for fd in ours:
                os.close(fd)
            raise ToolServerError("crashed", str(error)) from error
        finally:
            for fd in (*theirs, *null):
                os.close(fd)
        before = self._servers.pop(order["name"], None)
        if before is not None:
            before.close()
        self._servers[order["name"]] = ServerProcess(order["name"], pid, ours[-1], ours[:-1])

    def _await_ready(self, order: dict[str, Any], watch: Callable[[], None]) -> socket.socket:
        server, deadline = self._servers[order["name"]], time.monotonic() + order["ready_s"]
        while time.monotonic() < deadline:
            watch()
            server.log.drain()
            # Looked at before the port: what has ended by then opens it no more, unless a child of it does.
            gone = server.ended
            connection = _connected(order["port"])
            if connection is not None:
                if order["ready"] == "tcp":
                    return connection
                with connection:
                    ready = _answers(connection, order["ready"], deadline)
                if ready and (again := _connected(order["port"])) is not None:
                    return again
            elif gone and self._is_over(server):
                raise ToolServerError(
                    "crashed", f"server {server.name!r} ended when it was started: {server.log.tail()}"
                )
            time.sleep(POLL_S)
        raise ToolServerError(
            "silent",
            f"server {server.name!r} was not ready on port {order['port']} within {order['ready_s']:g} s: "
            f"{server.log.tail()}",
        )

    def _is_over(self, server: ServerProcess) -> bool:
        """Whether a command that ended has failed, or left nobody behind to do its work."""
        left = {pid for pid, _ in processes.list_processes()} - self._shells.idle_pids
        return self._shells.status_of(server.pid) != 0 or not left


def hand_over(
    driver: socket.socket, servers: Servers, order: dict[str, Any], watch: Callable[[], None], first: bytes = b""
) -> bool:
    """Give the driver what leads to the server that order names; return whether it was started for that.

    first: what goes there before that.

    Raises:
        ServerFailed: see `Servers.connect`.
    """
    fds, fresh = servers.connect(order, watch)
    try:
        # One that hangs up without reading is met by the driver, who hears its answer.
        with contextlib.suppress(OSError):
            while first:
                first = first[os.write(fds[0], first) :]
        told = {"connected": True, "fresh": fresh, "note": servers.note(order["name"])}
        socket.send_fds(driver, [pack(told, fds=len(fds))], fds)
    finally:
        for fd in fds:
            os.close(fd)
    return fresh


def served(servers: Servers, order: dict[str, Any], told: Message) -> dict[str, Any]:
    """Take what the driver says at the end of a call to a server; return what that means for the call's answer."""
    fields = told.fields
    if "note" in fields:
        servers.take_note(order["name"], fields["note"])
    return {"read": fields["read"], "log": fields["log"] and servers.log(order.get("behind", order)["name"])}


def new_pipes(*, talks: bool) -> tuple[list[int], list[int]]:
    """Return our ends and a server's ends of its pipes: stdin and stdout where it talks over them, then its log."""
    ours, theirs = [], []
    if talks:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        ours.append(writing)
        theirs.append(reading)
    for _ in range(1 + talks):
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        # Whoever the server becomes may open /dev/stdout again.
        os.fchmod(writing, 0o666)
        ours.append(reading)
        theirs.append(writing)
    return ours, theirs


def _program(order: dict[str, Any]) -> str:
    # It must not inherit pid 1's shelter from the OOM killer.
    place = f"cd -- {quote(order['workdir'])} || cd /"
    return (
        f"printf 0 >/proc/self/oom_score_adj; {place}; exec /bin/bash --noprofile --norc -c {quote(order['command'])}"
    )


def _connected(port: int) -> socket.socket | None:
    """Return a connection to whoever listens on port of this sandbox's loopback; None where nobody does."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.ExitStack() as undo:
            try:
                connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.settimeout(CONNECT_S)
                connection.connect((address, port))
                connection.settimeout(None)
            except OSError:
                continue
            undo.pop_all()
            return connection
    return None


def _answers(connection: socket.socket, path: str, deadline: float) -> bool:
    """Whether GET path is answered with less than 500."""
    try:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        status = connection.recv(16).split(b" ")
    except OSError:
        return False
    return len(status) > 1 and status[0].startswith(b"HTTP/1.") and status[1][:3].isdigit() and int(status[1][:3]) < 500
