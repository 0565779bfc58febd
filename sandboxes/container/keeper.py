"""The process beside a container that runs commands in it, one at a time, and looks at what each of them changed.

It is outside: nothing in the container can reach or signal it. It ends when the driver's end of its socket closes or
when the container does, and takes the container with it.
"""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from sandboxes.container import cgroup_processes as household
from sandboxes.container import mounts as rooms
from sandboxes.container import terminal
from sandboxes.container.anchor import ContainerAnchor
from sandboxes.container.background import ContainerLeft
from sandboxes.container.changes import FOLDER, ContainerChanges
from sandboxes.container.checkpointing import Freezing, Parts
from sandboxes.container.exec_launch import Launch
from sandboxes.container.shell import limit
from sandboxes.container.shell_pool import ContainerShells
from sandboxes.container.tool_servers import ContainerServers
from sandboxes.guest import file_delta as delta
from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.background import AllLeft
from sandboxes.guest.changes import Stillness
from sandboxes.guest.process_io import Running, failed
from sandboxes.guest.shell import Shell
from sandboxes.guest.supervisor import Supervisor, not_started
from sandboxes.guest.survivors import Alive
from sandboxes.guest.terminal import give
from sandboxes.ipc.frames import Inbox, Message, pack
from sandboxes.linux import confine, processes
from sandboxes.linux import syscalls as kernel

READY_S = 10.0


class ContainerEndedError(Exception):
    """The container has ended."""


def run(channel: int, fields: dict[str, Any]) -> None:
    """Be a container's keeper until the driver lets go."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    driver = socket.socket(fileno=channel)
    house = household.Household(fields["pid"], fields["container"])
    _end_with_parent(house.init)
    try:
        # So that /proc/sysvipc shows the container's.
        namespace = os.open(f"/proc/{house.pid}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.CLONE_NEWIPC)
        os.close(namespace)
        # Its servers listen on its own loopback; this process has no other use for a network.
        namespace = os.open(f"/proc/{house.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.CLONE_NEWNET)
        os.close(namespace)
        _narrow(house.pid)
        lower = rooms.view(fields["lowers"], fields["view"])
        roots = delta.DeltaRoots(os.open(fields["upper"], FOLDER), lower, lower)
        anchor = ContainerAnchor(Path(fields["box"]), house)
        Keeper(driver, house, anchor, roots, fields).serve()
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(house.init, signal.SIGKILL)


def _end_with_parent(init: int) -> None:
    """Have the container killed when the doorman ends, whatever this process is doing then.

    By a handler: a doorman whose driver was killed ends at once, and a SIGKILL from it would come before this process
    has seen its own channel close, and leave the container to the next start.
    """
    own = os.getpid()

    def end(_number: int, _frame: object) -> None:
        # Not in those that it forks, which run as the agent.
        if os.getpid() == own:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(init, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


def _narrow(pid: int) -> None:
    """See `rooms.narrow`, which needs a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rooms.narrow(pid)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, f"the container's mounts could not be narrowed: {os.strerror(code)}")


class Keeper(Supervisor):
    """One container at work. fields: what the driver told of it; `begin` tells of spec and state."""

    def __init__(
        self,
        driver: socket.socket,
        house: household.Household,
        anchor: ContainerAnchor,
        roots: delta.DeltaRoots,
        fields: dict[str, Any],
    ) -> None:
        self.driver, self.house, self.anchor = driver, house, anchor
        self.inbox = Inbox()
        self.user = household.ids(house.pid)
        self.inherited = household.environment(house.pid)
        self.output_bytes = 0
        self.shells: ContainerShells = ContainerShells(anchor, house, set(self.inherited))
        self.servers = ContainerServers(anchor, house)
        self.left = AllLeft(0)
        self.changes: ContainerChanges = ContainerChanges(house, roots, fields)
        self.alive = Alive(self.shells, self.left, self._living)
        self.stillness = Stillness()
        self.freezing = Freezing(
            Parts(house, anchor, self.shells, self.servers, self.left, self.alive, self.changes, self.stillness)
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Say that the container is ready; then answer until the driver is gone, or the container."""
        bash = self.anchor.ready(READY_S)
        for pid in self.shells.anchor_pids:
            limit(pid, self.changes.disk_bytes)
        self._reply({"bash": bash})
        while (message := self._next()) is not None:
            match message.fields["op"]:
                case "begin":
                    self._begin(message)
                case "exec" | "file" | "serve" | "process" | "tend":
                    self._call(message)
                case "start":
                    self._start_servers(message.fields["servers"])
                case "freeze" | "dump" | "copy" | "describe" | "terminal":
                    self._show(message)

    def _show(self, message: Message) -> None:
        """Serve who freezes this state, or looks at it."""
        fields = message.fields
        match fields["op"]:
            case "freeze":
                self._reply(self.freezing.freeze(fields))
            case "dump":
                self._reply(self.freezing.dump(fields["program"], message.fds))
            case "copy":
                self._reply(self.freezing.copy(fields))
            case "terminal":
                launch, (columns, rows) = Launch(self.anchor, self.house, self.user[0]), fields["size"]
                give(self.driver, lambda: terminal.start_shell(launch, self.shells, (columns, rows)))
            case "describe":
                self.changes.look()
                known = {"sessions": self.shells.sessions, "pristine": self.shells.pristine}
                self._reply({"delta": self.changes.now, **known})

    def _begin(self, message: Message) -> None:
        """Become a sandbox: at the image's state, or at that of a copy; then start the shell that is asked first.

        With a checkpoint its processes come back instead, by a CRIU that the driver talks to.
        """
        fields = message.fields
        self.output_bytes = fields["output_bytes"]
        self.left.limit = self.output_bytes
        given = {name: value for name, value in self.inherited.items() if name not in {"HOSTNAME", "SHLVL"}}
        self.shells.begin(fields, {**fields["defaults"], **given, **fields["environment"]})
        self.changes.begin(fields["born_ns"], fields["copy"])
        if fields["checkpoint"] is not None:
            self._reply(
                self.freezing.bring_back(fields["checkpoint"], fields["program"], message.fds, self._await_restored)
            )
            return
        try:
            self.shells.ready(next(iter(self.shells.sessions), "main"))
        except ShellStartError as error:
            self._reply({"cannot_start": str(error)})
            return
        self._reply({})

    def _await_restored(self) -> None:
        self._reply({})
        while (message := self._next()) is not None and message.fields["op"] != "restored":
            self._reply({})

    # -- calls -------------------------------------------------------------------------------------------------------

    def _process(self, fields: dict[str, Any], stdin: bytes) -> dict[str, Any]:
        """Run a process of its own; the driver gets a socket on which its output comes."""
        heard, to = socket.socketpair()
        launch = Launch(self.anchor, self.house, self.user[0])
        with to, heard:
            socket.send_fds(self.driver, [pack({"connected": True}, fds=1)], [heard.fileno()])
            heard.close()
            spared = {pid for pid, _ in self.house.living()}
            try:
                running = launch.begin(fields, stdin, to)
                return self._conclude_process(running, launch, spared, fields)
            except ShellStartError as error:
                self._mind({self.house.init} if household.exiting(self.house.pid) else set())
                return failed(to, str(error))
            finally:
                launch.end()

    def _conclude_process(
        self, running: Running, launch: Launch, spared: set[int], fields: dict[str, Any]
    ) -> dict[str, Any]:
        until, detach = time.monotonic() + fields["timeout_s"], bool(fields["arguments"].get("detach"))
        ending = running.pump(until, self.driver.fileno(), self._tending(), self._client_left, detach=detach)
        if household.exiting(self.house.pid):
            raise ContainerEndedError("the container ended during a call")
        if ending in {"timeout", "disk", "host"}:
            self.house.kill_except(spared)
        elif ending == "left" and "process" in fields["arguments"]:
            self._leave(running, launch, fields["arguments"], until)
        elif ending == "left":
            for fd in running.outputs:
                self.servers.take_over(fd, launch.inner)
        answer = running.conclude(ending, lambda: self.shells.status_of(launch.inner), self.changes.disk_bytes)
        return {**answer, "detached": detach, "kept": "process" in fields["arguments"]}

    def _leave(self, running: Running, launch: Launch, told: dict[str, Any], until: float) -> None:
        launch.left = True
        ends, death = running.hand_over()
        inner, pid = launch.inner, self.house.find(launch.inner) or 0
        status = lambda: self.shells.status_of(inner)  # noqa: E731
        process = ContainerLeft(told, ends, death, pid, status, inner=inner, folder=launch.folder)
        process.until = until
        self.left.add(process)

    def _exec(self, fields: dict[str, Any], command: bytes) -> tuple[dict[str, Any], bytes]:
        spared = self.shells.anchor_pids | {pid for pid, _ in self.alive.processes}
        try:
            shell = self.shells.ready(fields["session"])
        except ShellStartError as error:
            return not_started(error)
        spared |= {other.pid for other in self.shells if other is not shell}
        shell.run(command)
        ending = self._wait(shell, fields["timeout_s"])
        return self._conclude(shell, ending, lambda: self.house.kill_except(spared, first=shell.pid))

    def _let_go(self, shell: Shell, ending: str) -> None:  # noqa: ARG002
        # The anchor has to be told to collect it, however it ended.
        self.shells.kill(shell)

    @property
    def _watched(self) -> list[int]:
        return [self.house.init]

    def _mind(self, events: set[int]) -> None:
        super()._mind(events)
        if self.house.init in events:
            raise ContainerEndedError("the container ended")

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        return {**order, "environment": {**self.shells.environment, **order["environment"]}}

    def _end_servers(self) -> None:
        self.house.kill_except(self.shells.anchor_pids)

    def _answer_call(self, answer: dict[str, Any], body: bytes, touched: str | None) -> None:
        if household.exiting(self.house.pid):
            # It is about to, before all others: what a call met since then is no answer.
            raise ContainerEndedError("the container ended during a call")
        self._reply(answer, body)
        if not self.alive and touched is not None:
            self.shells.renew([touched])

    def _become_user(self) -> None:
        namespace = os.open(f"/proc/{self.house.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.CLONE_NEWNS)
        os.umask(0o022)
        confine.limit_resources(self.changes.disk_bytes, None, None)
        confine.confine()
        uid, gid, groups = self.user
        if uid:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)

    def _living(self) -> set[processes.Process]:
        self.anchor.look_after()
        return self.house.living()
