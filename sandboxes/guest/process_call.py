"""The call that runs a process of its own: the same steps on every platform, over what the platform has started."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.background import BackgroundProcess, BackgroundProcesses
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.process_io import Running
from sandboxes.guest.tool_servers import Servers
from sandboxes.ipc.messages import ProcessOutcome, ProcessStarted, RunProcess
from sandboxes.process_output import OUT, frame


class StartedProcess(Protocol):
    """A process that a platform has started."""

    @property
    def running(self) -> Running:
        """Its streams."""

    @property
    def pid(self) -> int:
        """Its process, as `Shells.status_of` knows it."""

    def status(self) -> int:
        """Return its exit code once it has ended."""

    def kill(self) -> None:
        """Kill it and everything that it has started."""

    def keep(self, description: Mapping[str, Any]) -> BackgroundProcess:
        """Turn it into a background process."""

    def close(self) -> None:
        """Free what was made to start it."""


class ProcessFiles(Protocol):
    """The limits of what a sandbox writes; `platform.Files` has more."""

    disk_bytes: int

    def nests_too_deep(self) -> bool:
        """Look for directories that are nested too deeply."""


def run(
    link: DriverLink,
    background: BackgroundProcesses,
    servers: Servers,
    request: RunProcess,
    start: Callable[[socket.socket], StartedProcess],
    watch: Callable[[], str | None],
    client_detached: Callable[[], bool],
    files: ProcessFiles,
) -> tuple[ProcessOutcome, bool]:
    """Run a process until it ends, its time is up, or its client leaves it.

    Args:
        link: The socket to the proxy.
        background: Takes the process if its client leaves it and may poll it later.
        servers: Drain the process's output if its client leaves it for good.
        request: The process.
        start: Starts it; its output goes to the given socket.
        watch: Says, called again and again, that the disk has run out.
        client_detached: Takes a message from the proxy; returns whether the client has left the process.
        files: What the sandbox has written, for the message to a process that wrote too much.

    Returns:
        How it ended, and whether it was killed because the machine's disk was nearly full.
    """
    # A socket of its own for output: frames of a long output must not delay answers on the main socket.
    proxys, ours = socket.socketpair()
    # The proxy gets its end before the process starts: output must not fill a socket without a reader.
    link.hand_over(ProcessStarted(), [proxys.detach()])
    with ours:
        try:
            process = start(ours)
        except ShellStartError as error:
            if not error.broken:
                raise
            with contextlib.suppress(OSError):
                ours.sendall(frame(OUT, f"OCI runtime exec failed: {error}\r\n".encode()))
            return ProcessOutcome(126, timed_out=False), False
        try:
            until, detached = time.monotonic() + request.timeout_s, bool(request.arguments.get("detach"))
            # The deadline is a moment and not a duration, because a process that is left in the background keeps it.
            ending = process.running.pump(until, link.fileno(), watch, client_detached, detach=detached)
            # A process can nest directories faster than the watch looks, and output cannot follow its end.
            if ending == "ended" and files.nests_too_deep():
                ending = "depth"
            kept = "process" in request.arguments
            # A process that its client has left goes on; every other ending but its own is a kill.
            if ending in {"timeout", "disk", "depth", "host"}:
                process.kill()
            elif ending == "detached" and kept:
                # The time limit goes on counting in the background.
                left_behind = process.keep(request.arguments)
                left_behind.until = until
                background.add(left_behind)
            elif ending == "detached":
                # Nothing will poll it, but a full pipe would stop it.
                for fd in process.running.outputs:
                    servers.drain_detached(fd, process.pid)
            code = process.running.conclude(ending, process.status, files.disk_bytes)
            return ProcessOutcome(code, ending == "timeout", detached=detached, kept=kept), ending == "host"
        finally:
            process.close()
