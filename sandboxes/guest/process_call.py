"""The call that runs a process of its own: its start under the anchor, and what becomes of it when the call ends."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sandboxes.guest.anchored_processes import known
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.background import BackgroundProcess, BackgroundProcesses, pending_outputs
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.exec_script import PROGRAM, TEXT_FD, refusal, text
from sandboxes.guest.files.changes import Changes
from sandboxes.guest.performed import Performed
from sandboxes.guest.process_io import Running, due_of, new_pipes, open_terminal
from sandboxes.guest.shells import Shells
from sandboxes.guest.tool_servers import Servers
from sandboxes.guest.users import UnknownUserError, User, read
from sandboxes.ipc.messages import ProcessOutcome, ProcessStarted, RunProcess
from sandboxes.linux import processes
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.processes import death_of
from sandboxes.linux.sandbox_groups import PidsLimit
from sandboxes.process_output import OUT, frame


@dataclass(frozen=True)
class StartedProcess:
    """A process that the anchor has started for a call."""

    running: Running
    pid: int
    shells: Shells
    spared: set[processes.Process]

    def status(self) -> int:
        """Return its exit code once it has ended."""
        return known(self.shells.status_of(self.pid))

    def kill(self) -> None:
        """Kill it and all processes that were not there before it."""
        self.shells.kill_except(self.spared)

    def keep(self, description: Mapping[str, Any]) -> BackgroundProcess:
        """Turn it into a background process."""
        ends, death = self.running.hand_over()
        return background_process(self.shells, description, ends, death, self.pid)


def run(
    link: DriverLink,
    shells: Shells,
    background: BackgroundProcesses,
    servers: Servers,
    request: RunProcess,
    stdin: bytes,
    watch: Callable[[], str | None],
    client_detached: Callable[[], bool],
    files: Changes,
    deaths: int,
    limit: PidsLimit,
) -> Performed:
    """Run a process until it ends, its time is up, or its client leaves it."""
    # `watch` says, called again and again, and at once when `deaths` is readable, that the disk has run out.
    # `client_detached` takes a message from the proxy and returns whether the client has left the process.

    # A socket of its own for output: frames of a long output must not delay answers on the main socket.
    proxys, ours = socket.socketpair()
    # The proxy gets its end before the process starts: output must not fill a socket without a reader.
    link.hand_over(ProcessStarted(), [proxys.detach()])
    with ours:
        try:
            process = start(shells, request, stdin, ours)
        except ShellStartError as error:
            if not error.broken:
                raise
            with contextlib.suppress(OSError):
                ours.sendall(frame(OUT, f"OCI runtime exec failed: {error}\r\n".encode()))
            return Performed(ProcessOutcome(126, timed_out=False), is_broken=True)
        until, detached = time.monotonic() + request.timeout_s, bool(request.arguments.get("detach"))
        # The deadline is a moment and not a duration, because a process that is left in the background keeps it.
        ending = process.running.pump(until, link.fileno(), deaths, watch, client_detached, detach=detached)
        # A process can nest directories faster than the watch looks, and output cannot follow its end.
        if ending == "ended" and files.nests_too_deep():
            ending = "depth"
        if ending == "ended" and limit.reached() is not None:
            ending = "pids"
        kept = "process" in request.arguments
        # A process that its client has left goes on; every other ending but its own is a kill.
        if ending in {"timeout", "disk", "depth", "pids", "host"}:
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
        outcome = ProcessOutcome(code, ending == "timeout", detached=detached, kept=kept)
        return Performed(outcome, host_full=ending == "host")


def start(shells: Shells, request: RunProcess, stdin: bytes, to: socket.socket) -> StartedProcess:
    """Start the process of a call under the anchor; its output goes to the proxy's socket."""
    # A timeout kills what is not in this list. It is taken before the start, so no process that the start makes is
    # spared.
    spared = processes.list_processes()
    arguments, terminal_path = request.arguments, ""
    user, unknown = _user(shells, arguments.get("user"))
    if arguments.get("tty"):
        master, terminal_path = open_terminal("/dev/ptmx", arguments.get("size"))
        os.chown(terminal_path, user.uid, -1)
        ours, theirs = {1: master}, {0: os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)}
    else:
        ours, theirs = new_pipes(stdin=bool(stdin or arguments.get("stdin")))
    # The script may be longer than an argument can be, so bash reads it from memory.
    theirs[TEXT_FD] = os.memfd_create("text", os.MFD_CLOEXEC)
    redirections = f"0<>{terminal_path} 1>&0 2>&0 {TEXT_FD}<&-" if terminal_path else f"{TEXT_FD}<&-"
    # The terminal's path is one of this sandbox's /dev/pts, so the script can open it by name.
    if unknown:
        script = refusal(unknown, redirections)
    else:
        # Docker sets HOME from /etc/passwd unless the request sets it.
        variables = request.environment | ({} if "HOME" in request.environment else {"HOME": user.home})
        script = text(arguments, variables, redirections=redirections, terminal=terminal_path)
    os.pwrite(theirs[TEXT_FD], script, 0)
    try:
        pid = shells.launch({}, theirs, PROGRAM, user, arguments["cwd"])
        keeps_in = bool(arguments.get("stdin"))
        running = Running(ours, stdin, death_of(pid), to, keeps_in=keeps_in, due=due_of(arguments))
        return StartedProcess(running, pid, shells, spared)
    except BaseException:
        close_all(ours.values())
        raise
    finally:
        close_all(theirs.values())


def _user(shells: Shells, name: str | None) -> tuple[User, str]:
    if not name:
        return shells.user, ""
    try:
        user = read(name)
    except UnknownUserError as error:
        return shells.user, str(error)
    if shells.changes_users:
        return user, ""
    # The user that everything runs as, without the groups that it cannot take.
    same = (user.uid, user.gid) == (shells.user.uid, shells.user.gid)
    return shells.user, "" if same else f"unable to become user {name}: processes have one user only here"


def background_process(
    shells: Shells, description: Mapping[str, Any], ends: Mapping[int, int], death: int, pid: int
) -> BackgroundProcess:
    """Return a process that calls may poll from now on; see `BackgroundProcess`."""
    return BackgroundProcess(
        description, pending_outputs(ends), ends.get(0, -1), death, pid, lambda: known(shells.status_of(pid))
    )
