"""The tool servers of a container, held from outside: started by its anchor, reached in its network namespace."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandboxes.container.anchor import ContainerAnchor
from sandboxes.container.boot_scripts import BOX, SHELL_FIFOS, SHELL_TEXTS
from sandboxes.container.cgroup_processes import Household
from sandboxes.container.shell import RIGHTS
from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.tool_servers import Log, ServerProcess, Servers, ToolServerError
from sandboxes.ipc.messages import ServerOrder
from sandboxes.shell_quote import quote


class ContainerServer(ServerProcess):
    """One whose pipes are FIFOs in a directory of the box: `go` is its stdin, `dump` its stdout, `out` its log.

    inner: what the container calls its process.
    """

    def __init__(self, name: str, pid: int, inner: int, folder: Path, fds: Mapping[str, int], *, talks: bool) -> None:
        super().__init__(name, pid, fds["out"], (fds["go"], fds["dump"]) if talks else ())
        # Held open, so that nobody waits for the other end.
        self._rest = [fd for name, fd in fds.items() if name != "out" and fd not in self.pipes]
        self.inner, self.folder, self.talks = inner, folder, talks

    def close(self) -> None:
        """See `ServerProcess.close`."""
        super().close()
        for fd in self._rest:
            os.close(fd)
        self._rest = []

    def remember(self) -> dict[str, Any]:
        """See `ServerProcess.remember`; its FIFOs are known by their directory."""
        script = (self.folder / "restore").read_text("latin-1")
        told = {"name": self.name, "inner": self.inner, "folder": self.folder.name, "talks": self.talks}
        return {**told, "script": script, "note": self.note}


class ContainerServers(Servers):
    """Those of one container."""

    def __init__(self, anchor: ContainerAnchor, house: Household) -> None:
        super().__init__()
        self._anchor, self._house = anchor, house
        self._strays: list[Log] = []
        self._prepared: list[tuple[dict[str, Any], dict[str, int]]] = []

    def prepare_again(self, told: list[dict[str, Any]]) -> None:
        """Make what servers that will be restored have open, under the names that they know."""
        self._prepared = [
            (one, _furnish(self._anchor.box / one["folder"], one["script"].encode("latin-1"))) for one in told
        ]

    def adopt_prepared(self) -> None:
        """Take over those that came back."""
        for one, fds in self._prepared:
            pid = self._house.find(one["inner"]) or 0
            folder = self._anchor.box / one["folder"]
            self._servers[one["name"]] = ContainerServer(
                one["name"], pid, one["inner"], folder, fds, talks=one["talks"]
            )
            self.take_note(one["name"], one["note"])

    @property
    def outputs(self) -> dict[int, Log]:
        """See `Servers.outputs`."""
        return {**super().outputs, **{log.fd: log for log in self._strays if log.fd >= 0}}

    def drain_detached(self, fd: int, pid: int) -> None:  # noqa: ARG002 - no checkpoint holds its FIFO
        """From now on drain the output of a process that its client has left."""
        self._strays.append(Log(fd))

    def _start(self, order: ServerOrder) -> None:
        talks = order.port is None
        self._anchor.look_after()
        folder = self._anchor.new_folder()
        fds = _furnish(folder, _script(order, folder.name, talks=talks))
        try:
            pid, inner = self._anchor.start(folder.name)
        except ShellStartError as error:
            # Mostly it ended before it could be looked at, and said why.
            said = Log(fds["out"]).tail()
            for fd in fds.values():
                os.close(fd)
            what = f"server {order.name!r} ended when it was started: {said}"
            raise ToolServerError("crashed", f"{what} ({error})") from error
        before = self._servers.pop(order.name, None)
        if before is not None:
            before.close()
        self._servers[order.name] = ContainerServer(order.name, pid, inner, folder, fds, talks=talks)

    def _is_over(self, server: ServerProcess) -> bool:
        """See `Servers._is_over`. A server here stays in the foreground."""
        return server.ended


def _furnish(folder: Path, script: bytes) -> dict[str, int]:
    """Make the directory that the anchor starts a shell from; return our ends of the FIFOs in use."""
    folder.mkdir(mode=0o755)
    fds = {}
    for name in SHELL_FIFOS:
        os.mkfifo(folder / name)
        (folder / name).chmod(0o666)
        # The anchor's shell opens all of them, and would wait for the other end.
        fds[name] = os.open(folder / name, RIGHTS)
    for name in SHELL_TEXTS:
        (folder / name).write_bytes(script if name == "restore" else b"")
        (folder / name).chmod(0o644)
    return fds


def _script(order: ServerOrder, folder: str, *, talks: bool) -> bytes:
    """Return what the shell does that becomes the server."""
    names = " ".join(f"export {name}={quote(value)};" for name, value in order.environment.items())
    here = f"{BOX}/{folder}"
    places = f"0<{here}/go 1>{here}/dump 2>{here}/out" if talks else f"0</dev/null 1>{here}/out 2>{here}/out"
    lines = (names, f"cd -- {quote(order.workdir)} || cd /", f"exec /bin/sh -c {quote(order.command)} {places}")
    return "\n".join((*lines, "")).encode(errors="surrogateescape")
