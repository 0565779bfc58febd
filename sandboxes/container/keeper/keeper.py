"""The keeper: the process beside a container that runs commands in it and looks at what each of them changed."""

# Theory of operation.
#
# A container is any image, so the only helper inside is a POSIX shell, the anchor, with which the container starts. The
# keeper stays outside, where no process of the container can see, signal or stop it. It talks to the anchor over FIFOs
# in a directory that is mounted into the container (its box). It sees the container's processes through the container's
# control group, and its files through Docker's overlay directories.
#
# Two numbers name each process. `pid` is its number on this machine, for signals and /proc. `inner` is its number in
# the container, by which the anchor knows it.
#
# The keeper ends when the proxy closes its end of the socket, or when the container ends. It takes the container along.

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandboxes.container.keeper import cgroup_processes, mounts, network, start, terminal
from sandboxes.container.keeper.anchor import ContainerAnchor
from sandboxes.container.keeper.background import ContainerBackgroundProcess
from sandboxes.container.keeper.changes import ContainerChanges, DamagedCopyError
from sandboxes.container.keeper.checkpointing import ContainerFreezer
from sandboxes.container.keeper.exec_launch import Launch
from sandboxes.container.keeper.shell import limit
from sandboxes.container.keeper.shell_pool import ContainerShells
from sandboxes.container.keeper.tool_servers import ContainerServers
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.background import BackgroundProcess, BackgroundProcesses
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.files import delta
from sandboxes.guest.files.changes import FOLDER
from sandboxes.guest.platform import Performed, not_started
from sandboxes.guest.process_io import Running
from sandboxes.guest.shell import Shell
from sandboxes.guest.supervisor import Supervisor
from sandboxes.guest.terminal import give
from sandboxes.ipc.codec import IpcMessage
from sandboxes.ipc.launch_messages import ForkKeeper
from sandboxes.ipc.messages import (
    CallDone,
    DescribeState,
    Done,
    ExpectOrder,
    OpenTerminal,
    RunCommand,
    RunFileOperation,
    RunProcess,
    UseBackgroundProcess,
)
from sandboxes.ipc.server_messages import ServerOrder, StartServers, UseServer
from sandboxes.ipc.state_messages import (
    BeginSandbox,
    CopyFiles,
    DumpProcesses,
    FinishProcessRestore,
    FreezeContainer,
    KeeperReady,
    SandboxBegun,
)
from sandboxes.linux import confine, outlet, processes
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.socket_queues import SocketQueues

READY_S = 10.0
"""How long the anchor may take until it is ready: 0.1 s on an idle machine, seconds while many containers start.

The value is an estimate.
"""


class ContainerEndedError(Exception):
    """The container has ended, so there is nothing left to keep."""


def run(channel: int, order: ForkKeeper) -> None:
    """Be a container's keeper until the proxy closes its end.

    Args:
        channel: The socket to the proxy.
        order: What the keeper has to know of the container.
    """
    # The launcher ignores SIGCHLD, and a fork inherits that. With SIG_IGN, waitpid() would lose the exit codes of
    # children (wait(2)).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link = DriverLink(socket.socket(fileno=channel))
    if order.start is None:
        pattern, members = None, cgroup_processes.ContainerProcesses(order.pid, order.container)
    else:
        # Before the start: the pattern's layer must not be gone while a container is on it.
        pattern = cgroup_processes.ContainerProcesses(order.start.pattern, order.start.pattern_container)
        members = start.start(order.start, order.container)

    def end() -> None:
        # The death of pid 1 makes the kernel kill every process of its pid namespace (pid_namespaces(7)). What Docker
        # has started it then removes (`auto_remove`).
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(members.init, signal.SIGKILL)
        if order.start is not None:
            start.remove_groups(order.start)

    _end_with_parent(end)
    try:
        # In the container's IPC namespace /proc/sysvipc shows the container's objects.
        _enter(members.pid, "ipc", kernel.CLONE_NEWIPC)
        # The container's tool servers listen on its loopback. The keeper has no other use for a network.
        _enter(members.pid, "net", kernel.CLONE_NEWNET)
        network.require_loopback_only()
        kernel.bring_up_loopback()
        # In a child, because `mounts.narrow` changes the namespaces of the process that calls it.
        processes.run_in_child(lambda: mounts.narrow(members.pid), "the container's mounts could not be narrowed")
        # In a mount namespace that no process of the container is in.
        lower = mounts.view(order.lowers, order.view)
        roots = delta.DeltaRoots(os.open(order.upper, FOLDER), lower, lower)
        Keeper(link, members, ContainerAnchor(Path(order.box), members), roots, order, pattern).serve()
    finally:
        # However this process ends, the container must not go on without its keeper.
        end()


def _enter(pid: int, name: str, kind: int) -> None:
    """Move this process into a namespace of another process."""
    with open(f"/proc/{pid}/ns/{name}") as namespace:  # noqa: PTH123
        kernel.setns(namespace.fileno(), kind)


def _message_queues() -> int | None:
    """Return a directory of the container's POSIX message queues; None if this kernel has none."""
    try:
        return kernel.message_queues()
    except OSError:
        return None


def _end_with_parent(end: Callable[[], None]) -> None:
    """Have the container ended when the keepers' launcher ends, whatever this process is doing then.

    The death signal is SIGTERM with a handler, not SIGKILL. When the proxy is killed, its launcher ends at once; a
    SIGKILL would come before this process has seen its own channel close, and would leave the container running.
    """
    own = os.getpid()

    def handle(_number: int, _frame: object) -> None:
        # Children inherit the handler and may run as the agent; the signal is for this process alone.
        if os.getpid() == own:
            end()
        os._exit(0)

    signal.signal(signal.SIGTERM, handle)
    # After the handler is set: the launcher may be dead at this moment already.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True)
class ContainerProcess:
    """A `StartedProcess` in a container, which the anchor has started."""

    running: Running
    launch: Launch
    members: cgroup_processes.ContainerProcesses
    shells: ContainerShells
    spared: set[int]

    @property
    def pid(self) -> int:
        """The process, as the container numbers it: the anchor knows it by that number."""
        return self.launch.inner

    def status(self) -> int:
        """Return its exit code once it has ended."""
        return self.shells.status_of(self.pid)

    def kill(self) -> None:
        """Kill it and all processes that were not there before it."""
        self.members.kill_except(self.spared)

    def keep(self, description: Mapping[str, Any]) -> BackgroundProcess:
        """Turn it into a background process, which keeps its directory of FIFOs."""
        launch, inner, shells = self.launch, self.pid, self.shells
        launch.keeps_folder = True
        # The descriptors change owners here; `close` of the launch must not close them.
        ends, death = self.running.hand_over()
        return ContainerBackgroundProcess(
            description, ends, death, self.members.find(inner) or 0, lambda: shells.status_of(inner),
            inner=inner, folder=launch.folder,
        )  # fmt: skip

    def close(self) -> None:
        """Free what was made to start it."""
        self.launch.end()


class Keeper:
    """The platform of a container: the supervisor's steps from outside of it, and freezing by copies."""

    def __init__(
        self,
        link: DriverLink,
        members: cgroup_processes.ContainerProcesses,
        anchor: ContainerAnchor,
        roots: delta.DeltaRoots,
        order: ForkKeeper,
        pattern: cgroup_processes.ContainerProcesses | None,
    ) -> None:
        self._link, self._members, self._anchor, self._pattern = link, members, anchor, pattern
        # Until the anchor runs, pid 1 may still be Docker's own `runc init`, with the variables of runc.
        self._has_bash = anchor.ready(READY_S)
        # Read before any process of the agent runs: pid 1 is still what Docker started.
        self._user = cgroup_processes.ids(members.pid)
        # Of this process's IPC namespace, which is the container's.
        self._queues = _message_queues()
        self._inherited = cgroup_processes.environment(members.pid)
        self._shells = shells = ContainerShells(anchor, members, set(self._inherited))
        servers = ContainerServers(anchor, members)
        self._background = BackgroundProcesses(0)
        self._changes = ContainerChanges(members, roots, order)
        self._supervisor = Supervisor(link, shells, servers, self._background, self._changes, self, SocketQueues.open())
        self._survivors = self._supervisor.survivors
        self._listening: list[int] = []
        self._freezer = ContainerFreezer(members, anchor, shells, servers, self._changes, self._supervisor)

    def serve(self) -> None:
        """Report that the container is ready; then answer until the proxy is gone, or the container."""
        for pid in self._shells.anchor_pids:
            # Children inherit resource limits, and all processes descend from pid 1 or the anchor (getrlimit(2)).
            limit(pid, self._changes.disk_bytes)
        self._link.hand_over(KeeperReady(self._has_bash), [os.dup(self._members.init)])
        while (envelope := self._supervisor.next_request()) is not None:
            match request := envelope.message:
                case BeginSandbox():
                    self._begin(request, envelope.fds)
                case StartServers() | ExpectOrder() | DescribeState():
                    self._supervisor.answer(request)
                case RunCommand() | RunFileOperation() | RunProcess() | UseBackgroundProcess() | UseServer():
                    self._supervisor.call(request, envelope)
                case OpenTerminal():
                    self._open_terminal(request)
                case FreezeContainer() | CopyFiles() | DumpProcesses():
                    self._link.send(self._freeze(request, envelope.fds))

    def _freeze(self, request: FreezeContainer | CopyFiles | DumpProcesses, fds: list[int]) -> IpcMessage:
        """Carry out one of the three steps of freezing; return the answer."""
        if isinstance(request, FreezeContainer):
            return self._freezer.freeze(request)
        if isinstance(request, CopyFiles):
            return self._freezer.copy(request.folder, request.becomes)
        self._freezer.dump(request.criu_arguments, fds)
        return Done()

    def _open_terminal(self, request: OpenTerminal) -> None:
        launch, columns, rows = Launch(self._anchor, self._members, self._user[0]), request.columns, request.rows
        give(self._link, lambda: terminal.start_shell(launch, self._shells, columns=columns, rows=rows))

    def _begin(self, order: BeginSandbox, fds: list[int]) -> None:
        """Become a sandbox: at the state of the image, or at the state of a copy.

        Without a checkpoint the shell that is likely to be used first is started. With one, the processes come back
        instead, by a CRIU that the proxy talks to.
        """
        # Before any process of the agent, also of a checkpoint, could take the port.
        self._listening = [outlet.listen()] if order.egress else []
        self._background.max_bytes = order.output_bytes
        # Every shell counts SHLVL by itself, and a sandbox's host name is the same in all containers.
        given = {name: value for name, value in self._inherited.items() if name not in {"HOSTNAME", "SHLVL"}}
        self._shells.begin(order, {**order.defaults, **given, **order.environment})
        # The files come before any shell: no process may run over files that are being replaced.
        try:
            self._changes.begin(order.born_ns, order.copy)
        except DamagedCopyError as error:
            self._report(SandboxBegun(damaged=str(error)))
            return
        if order.checkpoint is not None:
            self._freezer.restore(order.checkpoint, order.criu_arguments, fds, self._await_restored)
            self._report(SandboxBegun())
            return
        self._report(SandboxBegun(self._shells.begin_first(next(iter(self._shells.sessions), "main"))))

    def _report(self, begun: SandboxBegun) -> None:
        """Send a message, the first time together with the listening socket of the egress."""
        listening, self._listening = self._listening, []
        self._link.hand_over(begun, listening)

    def _await_restored(self) -> None:
        """Report that CRIU was started, and wait until the proxy says that it has restored the processes."""
        self._report(SandboxBegun())
        while (envelope := self._supervisor.next_request()) is not None:
            if isinstance(envelope.message, FinishProcessRestore):
                return

    # -- the platform ------------------------------------------------------------------------------------------------

    @property
    def watched(self) -> Sequence[int]:
        """The first processes of the container and of its pattern: they are readable once these have ended."""
        return (self._members.init,) if self._pattern is None else (self._members.init, self._pattern.init)

    def require_sandbox(self) -> None:
        """Raise if the container has ended, or if its pattern has: Docker then removes a layer that the container uses.

        The container's first process is marked as exiting before the others are killed. What a call meets in between
        is no answer.
        """
        if cgroup_processes.exiting(self._members.pid) or select.select(self.watched, [], [], 0)[0]:
            raise ContainerEndedError("the container ended")

    def living(self, ours: Collection[int] = (), *, collects: bool = True) -> set[processes.Process]:
        """Return all processes of the container but `ours`; see `Platform.living`."""
        if collects:
            self._anchor.look_after()
        return {process for process in self._members.running() if process[0] not in ours}

    def founders(self) -> set[int]:
        """Return pid 1 and the processes that start the shells."""
        return {self._members.pid, *self._shells.anchor_pids}

    def ipc_objects(self) -> int:
        """Return the number of System V objects and POSIX message queues."""
        queues = 0 if self._queues is None else len(os.listdir(self._queues))  # noqa: PTH208 - a descriptor
        return processes.ipc_objects() + queues

    def proc_directory(self, pid: int) -> str:
        """Return the directory of a process in the container's /proc, which is another mount than this machine's."""
        return f"/proc/{self._members.pid}/root/proc/{cgroup_processes.inner_of(pid)}"

    def run_command(self, request: RunCommand, command: bytes) -> Performed:
        """Run a command in a session's shell."""
        # Survivors of earlier calls are not part of this command; a timeout must not kill them.
        spared = self._shells.anchor_pids | {pid for pid, _ in self._survivors.processes}
        try:
            shell = self._shells.ready(request.session)
        except ShellStartError as error:
            return not_started(error)
        spared |= {other.pid for other in self._shells if other is not shell}
        shell.run(command)
        return self._supervisor.finish_command(
            shell, request.timeout_s, lambda: self._members.kill_except(spared, first=shell.pid)
        )

    def start_process(self, request: RunProcess, stdin: bytes, to: socket.socket) -> ContainerProcess:
        """Start a process of its own under the anchor."""
        # Taken before the start, so that a timeout kills exactly what this process has started.
        spared = {pid for pid, _ in self._members.running()}
        launch = Launch(self._anchor, self._members, self._user[0])
        try:
            running = launch.begin(request, stdin, to)
        except BaseException:
            launch.end()
            raise
        return ContainerProcess(running, launch, self._members, self._shells, spared)

    def become_agent(self) -> None:
        """Move a child into the container's files, confine it, and make it the container's user."""
        # First the mount namespace, then confinement: `confine` gives up the right that setns needs.
        _enter(self._members.pid, "mnt", kernel.CLONE_NEWNS)
        os.umask(0o022)
        confine.limit_resources(self._changes.disk_bytes, None, None)
        confine.confine()
        uid, gid, groups = self._user
        if uid:
            confine.become_user(uid, gid, groups)

    def complete_order(self, order: ServerOrder) -> ServerOrder:
        """Return the order with the image's variables, which the proxy does not know, below its own."""
        return replace(order, environment={**self._shells.environment, **order.environment})

    def end_servers(self) -> None:
        """Kill everything in the container but its first process and the anchor."""
        self._members.kill_except(self._shells.anchor_pids)

    def forget_shell(self, shell: Shell, ending: str) -> None:  # noqa: ARG002
        """Give up a shell. However it ended, its parent has to collect it, and that is the anchor."""
        self._shells.kill(shell)

    def finish_call(self, answer: CallDone, body: bytes, fresh: list[str]) -> None:
        """Send the answer, unless the container ended during the call."""
        # The result of a call that the container's end cut short would be recorded as if the command had failed by
        # itself.
        self.require_sandbox()
        self._link.send(answer, body)
        if not self._survivors:
            self._shells.renew(fresh)
