"""The tool servers of a local sandbox: children of the anchor, over pipes."""

import os
from typing import Any

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.local_shells import LocalShells
from sandboxes.guest.tool_servers import ServerProcess, Servers, ToolServerError, new_pipes
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.linux import processes
from sandboxes.linux.descriptors import close_all
from sandboxes.shell_text import quote


class LocalServers(Servers):
    """The tool servers of one local sandbox."""

    def __init__(self, shells: LocalShells) -> None:
        super().__init__()
        self._shells = shells

    def drain_detached(self, fd: int, pid: int) -> None:
        """Drain the output of a process that its client has left as if it were a server's log.

        So a checkpoint also holds its pipe.
        """
        # A key that no server in a spec can collide with by accident; the pair is unique while the descriptor is open.
        name = f"left {pid} {fd}"
        self._servers[name] = ServerProcess(name, pid, fd)

    def adopt(self, remembered: list[dict[str, Any]], ends: list[int]) -> None:
        """Take over the servers that a checkpoint brought back.

        Args:
            remembered: What `ServerProcess.remember` returned of each.
            ends: Our ends of all their pipes, in the order of the remembered pipes.
        """
        # CRIU was given the pipes in the same order (`ipc.inherited`).
        remaining = iter(ends)
        for server in remembered:
            ours = [next(remaining) for _ in server["pipes"]]
            pipes = ours[:2] if server["talks"] else []
            log = ours[-1] if len(ours) > len(pipes) else -1
            self._servers[server["name"]] = ServerProcess(server["name"], server["pid"], log, pipes, server["note"])

    def _start(self, order: ServerOrder) -> None:
        talks = order.port is None
        ours, theirs = new_pipes(talks=talks)
        # A server on a port gets an empty stdin, because its requests come over the network.
        null = [] if talks else [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)]
        # A server that does not talk over stdin and stdout prints both streams to its log.
        streams = dict(enumerate(theirs if talks else [*null, theirs[0], theirs[0]]))
        try:
            pid = self._shells.launch(order.environment, streams, _program(order))
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
        """Whether a command that has ended failed, or left no process behind to do its work."""
        # A command that ends with 0 may have left a daemon behind, which opens the port later.
        others = {pid for pid, _ in processes.list_processes()} - self._shells.idle_pids
        return self._shells.status_of(server.pid) != 0 or not others


def _program(order: ServerOrder) -> str:
    # The supervisor is sheltered from the OOM killer, and a server must not inherit that.
    change_folder = f"cd -- {quote(order.workdir)} || cd /"
    become = f"exec /bin/bash --noprofile --norc -c {quote(order.command)}"
    return f"printf 0 >/proc/self/oom_score_adj; {change_folder}; {become}"
