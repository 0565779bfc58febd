"""The tool servers of a container, seen from its keeper. The anchor starts them; requests reach them in its network."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import BOX, SHELL_TEXTS
from sandboxes.container.keeper.anchor import ContainerAnchor
from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.container.keeper.file_kit import make_files
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.tool_servers import POLL_S, Log, ServerProcess, Servers, ToolServerError, is_open
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.linux.descriptors import close_all
from sandboxes.shell_text import quote


class ContainerServer(ServerProcess):
    """A tool server whose pipes are FIFOs in the box: `go` is its stdin, `dump` its stdout, `out` its log.

    Attributes:
        inner: Its pid in the container.
        folder: Its directory in the box.
        talks: Whether requests go over its stdin and stdout, not over a port.
    """

    def __init__(self, name: str, pid: int, inner: int, folder: Path, fds: Mapping[str, int], *, talks: bool) -> None:
        """Take over a process that runs.

        Args:
            name: The server's name.
            pid: Its pid on this machine.
            inner: Its pid in the container.
            folder: Its directory in the box.
            fds: The keeper's ends of the FIFOs, by file name.
            talks: Whether requests go over its stdin and stdout.
        """
        super().__init__(name, pid, fds["out"], (fds["go"], fds["dump"]) if talks else ())
        # The other ends stay open too: a FIFO without a second end would block or fail the server.
        self._rest = [fd for name, fd in fds.items() if name != "out" and fd not in self.pipes]
        self.inner, self.folder, self.talks = inner, folder, talks
        self._health_fd, self._check = fds["dump"], Log(fds["err"])

    def is_healthy(self) -> bool:
        """Return whether the service's health check has succeeded."""
        # What the check prints is drained here, so that it never blocks at a full FIFO.
        self._check.drain()
        try:
            return bool(os.read(self._health_fd, 1))
        except BlockingIOError:
            return False

    def why_unhealthy(self) -> str:
        """Return the last lines that the service's health check and the service printed."""
        return f"its check printed: {self._check.tail()}\nit printed: {self.log.tail()}"

    def close(self) -> None:
        """Close all descriptors."""
        super().close()
        close_all(self._rest)
        self._rest = []

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the server; a restore finds its FIFOs by their directory."""
        # The script goes along, so that a restore can make the directory with the same files.
        script = (self.folder / "restore").read_text("latin-1")
        stored = {"name": self.name, "inner": self.inner, "folder": self.folder.name, "talks": self.talks}
        return {**stored, "script": script, "note": self.note}


class ContainerServers(Servers):
    """The tool servers of one container."""

    def __init__(self, anchor: ContainerAnchor, members: ContainerProcesses) -> None:
        """Start no server.

        Args:
            anchor: What starts the servers.
            members: The container's processes.
        """
        super().__init__()
        self._anchor, self._members = anchor, members
        self._strays: list[Log] = []
        self._prepared: list[tuple[dict[str, Any], dict[str, int]]] = []

    def prepare_again(self, stored: list[dict[str, Any]]) -> None:
        """Make the files that the restored servers have open."""
        self._prepared = [
            (server, make_files(self._anchor.box / server["folder"], _texts(server["script"].encode("latin-1"))))
            for server in stored
        ]

    def adopt_prepared(self) -> None:
        """Adopt the servers that CRIU restored."""
        # After CRIU: the servers have opened the FIFOs under the same names by their paths.
        for stored, fds in self._prepared:
            # An inner pid survives a restore. 0 makes the server count as ended, and the next call starts it again.
            pid = self._members.find(stored["inner"]) or 0
            folder = self._anchor.box / stored["folder"]
            self._servers[stored["name"]] = ContainerServer(
                stored["name"], pid, stored["inner"], folder, fds, talks=stored["talks"]
            )
            self.take_note(stored["name"], stored["note"])

    def start(self, order: ServerOrder, watch: Callable[[], None]) -> None:
        """Start a server or a side service, and wait until it is ready; see `Servers.connect`.

        Raises:
            ToolServerError: It ended, or did not get ready in time.
        """
        if order.health is None:
            super().start(order, watch)
            return
        if order.port is not None and is_open(order.port):
            raise ToolServerError("crashed", f"{order.name}: another service has port {order.port} already")
        self._start(order)
        if order.port is not None:
            self._await_ready(order, order.port, watch).close()
        else:
            self._await_health(order, watch)

    def _await_health(self, order: ServerOrder, watch: Callable[[], None]) -> None:
        """Wait until the health check of a service has written its line to the FIFO that no service uses."""
        server, deadline = self._servers[order.name], time.monotonic() + order.ready_s
        assert isinstance(server, ContainerServer)
        while time.monotonic() < deadline:
            watch()
            server.log.drain()
            # Read before the health: what has ended by now is not healthy, whatever its check says.
            gone = server.ended
            if not gone and server.is_healthy():
                return
            if gone:
                raise ToolServerError("crashed", f"{order.name} ended when it was started: {server.log.tail()}")
            time.sleep(POLL_S)
        raise ToolServerError(
            "silent", f"{order.name} was not healthy within {order.ready_s:g} s; {server.why_unhealthy()}"
        )

    @property
    def outputs(self) -> dict[int, Log]:
        """The logs to drain, by descriptor: the servers' logs, and the outputs of detached processes."""
        return {**super().outputs, **{log.fd: log for log in self._strays if log.fd >= 0}}

    def drain_detached(self, fd: int, pid: int) -> None:  # noqa: ARG002 - no checkpoint holds its FIFO
        """Drain the output of a process from now on, because its client has detached."""
        self._strays.append(Log(fd))

    def _start(self, order: ServerOrder) -> None:
        talks = order.port is None and order.health is None
        self._anchor.look_after()
        folder = self._anchor.new_folder()
        fds = make_files(folder, _texts(_script(order, folder.name, talks=talks)))
        try:
            pid, inner = self._anchor.start(folder.name)
        except ShellStartError as error:
            # Usually the server ended at once, and its log says why.
            # The FIFO still holds what the server wrote, because the keeper has its reading end open.
            output = Log(fds["out"]).tail()
            close_all(fds.values())
            what = f"server {order.name!r} ended when it was started: {output}"
            raise ToolServerError("crashed", f"{what} ({error})") from error
        # Only after the new server runs: if it does not start, the log of the old one still says why that one ended.
        before = self._servers.pop(order.name, None)
        if before is not None:
            before.close()
        self._servers[order.name] = ContainerServer(order.name, pid, inner, folder, fds, talks=talks)

    def _is_over(self, server: ServerProcess) -> bool:
        """Return whether a server has ended. In a container it stays in the foreground, so its process tells."""
        return server.ended


def _texts(script: bytes) -> dict[str, bytes]:
    """Return the files of a shell that runs a script at its start."""
    return dict.fromkeys(SHELL_TEXTS, b"") | {"restore": script}


def _script(order: ServerOrder, folder: str, *, talks: bool) -> bytes:
    """Return the script of the shell that becomes the server."""
    names = " ".join(f"export {name}={quote(value)};" for name, value in order.environment.items())
    here = f"{BOX}/{folder}"
    redirections = f"0<{here}/go 1>{here}/dump 2>{here}/out" if talks else f"0</dev/null 1>{here}/out 2>{here}/out"
    health = ""
    if order.health:
        # In a subshell of a subshell, whose end makes the loop an orphan: the init reaps it, the service would not.
        check = (
            f"until ( {order.health} ) </dev/null >{here}/err 2>&1; do sleep 0.2 || sleep 1; done; echo >{here}/dump"
        )
        health = f"( ( {check} ) </dev/null >/dev/null 2>&1 & )"
    start = f"exec /bin/sh -c {quote(order.command)} {redirections}"
    lines = (names, f"cd -- {quote(order.workdir)} || cd /", health, start)
    return "\n".join((*lines, "")).encode(errors="surrogateescape")
