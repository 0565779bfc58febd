"""The tool servers of a local sandbox: children of the anchor, over pipes."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.local_shells import LocalShells
from sandboxes.guest.process_io import death_of
from sandboxes.guest.tool_servers import POLL_S, Log, ServerProcess, Servers, ToolServerError, is_open, new_pipes
from sandboxes.guest.users import ROOT
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.linux import processes
from sandboxes.linux.descriptors import Opened, close_all
from sandboxes.shell_text import quote

_CHECK_S = 0.2
"""The pause between two health checks of a service that starts. The value is an estimate."""


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
        """Run the health check of a service again and again, until it succeeds."""
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
        """Run the health check once; return whether it has succeeded, and what it has printed."""
        ours, theirs = new_pipes(talks=False)
        streams = {0: os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 1: theirs[0], 2: theirs[0]}
        log = Log(ours[0])
        try:
            pid = self._shells.launch({}, streams, f"printf 0 >/proc/self/oom_score_adj; {order.health}", ROOT)
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
        """Whether a command that has ended failed, or left no process behind to do its work."""
        # A command that ends with 0 may have left a daemon behind, which opens the port later.
        others = {pid for pid, _ in processes.list_processes()} - self._shells.idle_pids
        return self._shells.status_of(server.pid) != 0 or not others


def _program(order: ServerOrder) -> str:
    # The supervisor is sheltered from the OOM killer, and a server must not inherit that.
    change_folder = f"cd -- {quote(order.workdir)} || cd /"
    # In an image without bash its own shell runs it, because the server's program is the image's.
    shell = "s=/bin/sh; [ ! -x /bin/bash ] || s='/bin/bash --noprofile --norc'"
    become = f"exec $s -c {quote(order.command)}"
    return f"printf 0 >/proc/self/oom_score_adj; {change_folder}; {shell}; {become}"
