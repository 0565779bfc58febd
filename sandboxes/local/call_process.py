"""A process of its own for one call of a local sandbox: its start under the anchor, and its life after the call.

Process: pid 1 of a local sandbox. It loads only the standard library.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandboxes.guest.anchored_processes import known
from sandboxes.guest.background import BackgroundProcess, pending_outputs
from sandboxes.guest.exec_script import PROGRAM, TEXT_FD, refusal, text
from sandboxes.guest.process_io import Running, death_of, due_of, new_pipes, open_terminal
from sandboxes.guest.shells import Shells
from sandboxes.guest.users import UnknownUserError, User, read
from sandboxes.ipc.messages import RunProcess
from sandboxes.linux import processes
from sandboxes.linux.descriptors import close_all


@dataclass(frozen=True)
class LocalProcess:
    """A `StartedProcess` in a local sandbox, which the anchor has started."""

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

    def close(self) -> None:
        """Do nothing: its start has left nothing behind."""


def start(shells: Shells, request: RunProcess, stdin: bytes, to: socket.socket) -> LocalProcess:
    """Start the process of a call under the anchor.

    Args:
        shells: The sandbox's shells.
        request: What to start.
        stdin: The beginning of its input.
        to: The proxy's socket for its output.

    Raises:
        ShellStartError: The anchor cannot start it.
    """
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
        return LocalProcess(running, pid, shells, spared)
    except BaseException:
        close_all(ours.values())
        raise
    finally:
        close_all(theirs.values())


def _user(shells: Shells, name: str | None) -> tuple[User, str]:
    """Return the user of a process, and why it cannot be started as the one that was asked for."""
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
    return (
        shells.user,
        "" if same else f"unable to become user {name}: processes have one user only here",
    )


def background_process(
    shells: Shells, description: Mapping[str, Any], ends: Mapping[int, int], death: int, pid: int
) -> BackgroundProcess:
    """Return a process that calls may poll from now on.

    Args:
        shells: The sandbox's shells, whose anchor started the process.
        description: The answer that says how it was started.
        ends: Our ends of its streams, by stream number.
        death: A descriptor that is readable once it has ended.
        pid: Its pid.
    """
    return BackgroundProcess(
        description, pending_outputs(ends), ends.get(0, -1), death, pid, lambda: known(shells.status_of(pid))
    )
