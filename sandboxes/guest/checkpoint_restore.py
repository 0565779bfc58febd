"""pid 1's part in restoring a checkpoint: pipes to what comes back, and CRIU, started before anything is confined."""

import os
from typing import Any

from sandboxes.guest.anchor import Anchor
from sandboxes.guest.criu_launch import operate, set_last_pid
from sandboxes.guest.shell import Shell, new_pipes
from sandboxes.guest.tool_servers import new_pipes as new_server_pipes
from sandboxes.linux import processes

OUT_OF_THE_WAY = 1000
"""CRIU and its helpers get pids this far above those that have to be restored."""


class Restoring:
    """Under way from its making to `finish`.

    files: socket to the driver, the host's root, images, kernel features; all become ours.
    """

    def __init__(self, checkpoint: dict[str, Any], program: list[str], files: list[int]) -> None:
        self.checkpoint = checkpoint
        requests, answering = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        theirs = [requests[0], answering[1]]
        self._anchor_ends = (requests[1], answering[0])
        self._shell_ends: list[dict[int, int]] = []
        for shell in checkpoint["shells"]:
            ours, yours = new_pipes()
            self._shell_ends.append(ours)
            theirs += [yours[place] for place in sorted(map(int, shell["pipes"]))]
        self._servers = list(checkpoint.get("servers", ()))
        self._server_ends: list[int] = []
        for server in self._servers:
            pairs = list(zip(*new_server_pipes(talks=server["talks"]), strict=True))
            for end, yours_end in pairs[: len(server["pipes"])]:
                self._server_ends.append(end)
                theirs.append(yours_end)
            for pair in pairs[len(server["pipes"]) :]:
                # Of a log that was closed.
                for fd in pair:
                    os.close(fd)
        self._left = [(process, _pipes(process["places"], theirs)) for process in checkpoint.get("left", ())]
        theirs += [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for _, path in sorted(checkpoint["mapped"].items())]
        reply, host_root, *rest = files
        self._host_root = host_root
        set_last_pid(host_root, max([*checkpoint["pids"], checkpoint["last_pid"]]) + OUT_OF_THE_WAY)
        self._operator = os.fork()
        if self._operator == 0:
            operate(host_root, program, reply, [*rest, *theirs])
        for fd in (reply, *rest, *theirs):
            os.close(fd)

    def finish(self) -> None:
        """Wait for CRIU to be gone; from then on pids are given as if it had never been here."""
        os.waitpid(self._operator, 0)
        processes.reap()
        set_last_pid(self._host_root, self.checkpoint["last_pid"])
        os.close(self._host_root)

    def adopted(
        self,
    ) -> tuple[Anchor, list[Shell], list[dict[str, Any]], list[int], list[tuple[dict[str, Any], dict[int, int]]]]:
        """Return this side of what came back: the anchor, shells, servers, and processes that were left running.

        Servers and processes with our ends of their pipes.
        """
        shells = zip(self.checkpoint["shells"], self._shell_ends, strict=True)
        anchor = Anchor(self.checkpoint["anchor"]["pid"], self._anchor_ends)
        known = [Shell.adopt(told, ends) for told, ends in shells]
        return anchor, known, self._servers, self._server_ends, self._left


def _pipes(places: list[int], theirs: list[int]) -> dict[int, int]:
    """Make the pipes of a process; return our ends by their places, and add the other ends to theirs."""
    ours = {}
    for place in places:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        ours[place] = writing if place == 0 else reading
        os.set_blocking(ours[place], False)
        other = reading if place == 0 else writing
        os.fchmod(other, 0o666)
        theirs.append(other)
    return ours
