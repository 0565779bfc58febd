"""Pid 1's part in restoring a checkpoint: pipes to the restored processes, and starting CRIU."""

# Theory of operation.
#
# Restored processes had pipes whose other ends were in the old pid 1. CRIU cannot bring those back, because that
# process is not in the tree. So, before anything is restored:
#
# 1. New pipes are made for the anchor, each shell, each server and each background process, in the fixed order of
#    `ipc.inherited.inherited`. The proxy tells CRIU the old pipes' names in the same order.
# 2. Mapped files that CRIU cannot open by itself are opened by path, at the end of that order.
# 3. CRIU inherits the far ends, and gives each restored process the new pipe in place of its old one.
#
# Processes keep their pids, since shells know their children by them. CRIU and its helpers need pids too while they
# work. They get pids far above the restored ones, and afterwards the counter is set to where it was when the checkpoint
# was taken. So the next process gets the pid that it would have got without a checkpoint.
#
# All this happens before pid 1 gives up its rights: restoring needs them, and the agent's processes do not run yet.

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.programs import adopted_anchor
from sandboxes.guest.anchors.shell_kit import PAGE, narrow
from sandboxes.guest.anchors.shell_kit import new_pipes as new_shell_pipes
from sandboxes.guest.checkpoints.criu_launch import CriuFiles, operate
from sandboxes.guest.shell import Shell
from sandboxes.guest.shell_start import adopt
from sandboxes.guest.tool_servers import new_pipes as new_server_pipes
from sandboxes.ipc.state_messages import Checkpoint
from sandboxes.linux import mounts, oom_score, processes
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all

PID_DISTANCE = 1000
"""How far above the restored pids those of CRIU and its helpers begin. CRIU forks some ten helpers a process tree. The
value is an estimate."""


class Restored(NamedTuple):
    """Our side of what a checkpoint brought back."""

    anchor: Anchor
    shells: list[Shell]
    servers: list[dict[str, Any]]  # What was remembered of each server.
    server_ends: list[int]  # Our ends of all servers' pipes, in order.
    # What was remembered of each background process, with our ends of its pipes by stream number.
    background: list[tuple[dict[str, Any], dict[int, int]]]
    restless: bool  # Whether the processes may have been changing files by themselves.


class Restoring:
    """One restore, under way from the constructor's return to `finish`."""

    def __init__(self, checkpoint: Checkpoint, arguments: list[str], files: Sequence[int]) -> None:
        """Make the pipes and start CRIU. The files are `ns_last_pid`, then the `CriuFiles`; they are closed here."""
        self._checkpoint = checkpoint
        theirs: list[int] = []
        self._anchor_ends = _anchor_pipes(theirs)
        self._shell_ends = [_shell_pipes(shell, theirs) for shell in checkpoint["shells"]]
        # Snapshots of older versions have no entries for servers and background processes.
        self._servers = list(checkpoint.get("servers", ()))
        self._server_ends = [end for server in self._servers for end in _server_pipes(server, theirs)]
        self._background = [
            (process, _process_pipes(process["places"], theirs)) for process in checkpoint.get("left", ())
        ]
        # The paths are the agent's, and this process has all rights still. A FIFO that took the name must not block it.
        flags = os.O_RDONLY | os.O_NONBLOCK
        theirs += [
            kernel.open_without_links(os.fsencode(path), flags) for _, path in sorted(checkpoint["mapped"].items())
        ]
        self._last_pid, *rest = files
        # Without this, CRIU itself could take a pid that it has to give to a restored process.
        processes.set_last_pid(self._last_pid, max([*checkpoint["pids"], checkpoint["last_pid"]]) + PID_DISTANCE)
        self._operator = os.fork()
        if self._operator == 0:
            os.close(self._last_pid)
            segments_of = checkpoint["anchor"]["pid"] if checkpoint.get("has_segments") else 0
            operate(CriuFiles(*rest), arguments, theirs, restores=True, segments_of=segments_of)
        close_all((*rest, *theirs))

    def finish(self) -> Restored:
        """Wait until CRIU is gone, and return our side of what came back."""
        checkpoint = self._checkpoint
        os.waitpid(self._operator, 0)
        # CRIU's helpers became children of pid 1 when CRIU ended.
        processes.reap()
        if checkpoint.get("has_segments"):
            # CRIU has made an IPC namespace for them. What this process starts belongs there too.
            mounts.enter_ipc(checkpoint["anchor"]["pid"])
        processes.set_last_pid(self._last_pid, checkpoint["last_pid"])
        os.close(self._last_pid)
        oom_score.let_lower(checkpoint["pids"])
        shells = zip(checkpoint["shells"], self._shell_ends, strict=True)
        return Restored(
            adopted_anchor(checkpoint["anchor"], self._anchor_ends),
            [adopt(remembered, ends) for remembered, ends in shells],
            self._servers,
            self._server_ends,
            self._background,
            restless=checkpoint["restless"],
        )


def _anchor_pipes(theirs: list[int]) -> tuple[int, int]:
    requests, replies = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    narrow([requests[1]], 2 * PAGE)
    narrow([replies[0]])
    theirs += [requests[0], replies[1]]
    return requests[1], replies[0]


def _shell_pipes(shell: dict[str, Any], theirs: list[int]) -> dict[int, int]:
    ours, ends = new_shell_pipes()
    theirs += [ends[number] for number in sorted(map(int, shell["pipes"]))]
    return ours


def _server_pipes(server: dict[str, Any], theirs: list[int]) -> list[int]:
    pairs = list(zip(*new_server_pipes(talks=server["talks"]), strict=True))
    count = len(server["pipes"])
    theirs += [end for _, end in pairs[:count]]
    for pair in pairs[count:]:
        # The log was closed before the checkpoint: the server has no pipe that this one could replace.
        close_all(pair)
    return [our for our, _ in pairs[:count]]


def _process_pipes(numbers: list[int], theirs: list[int]) -> dict[int, int]:
    ours = {}
    for number in numbers:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        ours[number], other = (writing, reading) if number == 0 else (reading, writing)
        os.set_blocking(ours[number], False)
        # A process that has become another user may open /dev/stdout, which is this pipe, again.
        os.fchmod(other, 0o666)
        theirs.append(other)
    return ours
