"""The platform of a local sandbox: the supervisor's steps in pid 1, and freezing by layers."""

import os
import socket
import time
from collections.abc import Collection, Sequence
from typing import Any

from sandboxes.guest import terminal
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.anchors.template import spares
from sandboxes.guest.background import BackgroundProcesses
from sandboxes.guest.checkpoint_restore import Restored
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.files import delta
from sandboxes.guest.files.changes import Changes
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.guest.local_shells import LocalShells
from sandboxes.guest.platform import Performed, not_started
from sandboxes.guest.process_io import death_of
from sandboxes.guest.shell import Shell
from sandboxes.guest.supervisor import CallRequest, Supervisor
from sandboxes.guest.tool_servers import Servers
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.fork_pages import own_pages
from sandboxes.ipc.messages import (
    CallDone,
    DescribeState,
    Done,
    ExpectOrder,
    OpenTerminal,
    RunCommand,
    RunProcess,
    StateSummary,
)
from sandboxes.ipc.server_messages import StartServers
from sandboxes.ipc.state_messages import (
    InspectHeld,
    LayerManifest,
    LayersSwitched,
    LayerState,
    ListPages,
    NotFreezable,
    PagesListed,
    Pause,
    ProcessTree,
    SandboxStarted,
    StartSandbox,
)
from sandboxes.linux import confine, outlet, processes
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.socket_queues import SocketQueues
from sandboxes.linux.trees import TOO_DEEP
from sandboxes.local.call_process import LocalProcess, background_process, start


class Switches:
    """The socket on which switches of layers are reported, and the mounts that came with the last report.

    Attributes:
        link: The socket.
    """

    def __init__(self, link: DriverLink, mounts: list[int]) -> None:
        self.link, self._mounts = link, mounts

    def keep(self, mounts: list[int]) -> None:
        """Keep other mounts open, and close those of the layers that the sandbox has left.

        The last descriptor of a mount unmounts it. That waits for the kernel's readers (RCU), so it comes last.
        """
        before, self._mounts = self._mounts, mounts
        close_all(before)


class LocalPlatform:
    """The platform of a local sandbox."""

    def __init__(
        self,
        link: DriverLink,
        switches: Switches,
        roots: delta.DeltaRoots,
        order: StartSandbox,
        rows: StateRows,
        sockets: SocketQueues | None,
        shells: LocalShells,
    ) -> None:
        self._link, self._switches, self._seals = link, switches, order.seals
        self._shells = shells
        self._changes, self._background = Changes(roots, order, rows), BackgroundProcesses(order.output_bytes)
        self._servers = Servers(shells)
        self._supervisor = Supervisor(link, shells, self._servers, self._background, self._changes, self, sockets)
        self._survivors, self._stillness = self._supervisor.survivors, self._supervisor.stillness
        self._held_from = 0.0

    def serve(self, handed_over: list[int], *, begun: bool, broken: str | None = None) -> None:
        """Report that the sandbox has started, then answer requests until the proxy is gone.

        Args:
            handed_over: Descriptors that are closed here: the mount namespace, by which the launcher will switch
                layers, and with egress the listening socket.
            begun: Whether the first shell was begun. Then only the first call waits for it.
            broken: Why no shell can be started; None if one can.
        """
        if not (begun or broken):
            broken = self._shells.begin_first("main")
        started = SandboxStarted(broken, self._supervisor.state(), self._shells.pristine)
        self._link.hand_over(started, handed_over)
        if begun:
            self._shells.renew(["main"])
        while (envelope := self._supervisor.next_request()) is not None:
            match request := envelope.message:
                case StartServers() | ExpectOrder() | DescribeState():
                    self._supervisor.answer(request)
                case Pause():
                    self._pause(root=request.root, checkpoint=request.checkpoint)
                case InspectHeld():
                    self._inspect_held(request.paths)
                case ListPages():
                    self._link.send(PagesListed(own_pages()))
                case OpenTerminal():
                    self._open_terminal(request)
                case _ if isinstance(request, CallRequest):
                    self._supervisor.call(request, envelope)

    # -- the platform ------------------------------------------------------------------------------------------------

    def living(self, ours: Collection[int] = (), *, collects: bool = True) -> set[processes.Process]:
        """Return all processes of the sandbox but `ours`; see `Platform.living`."""
        if collects:
            self._shells.reap()
        return processes.list_processes(ours)

    def ipc_objects(self) -> int:
        """Return the number of System V objects and POSIX message queues."""
        return processes.ipc_objects() + len(os.listdir("/dev/mqueue"))  # noqa: PTH208 - pathlib is not loaded in pid 1

    def run_command(self, request: RunCommand, command: bytes) -> Performed:
        """Run a command in a session's shell."""
        # After a timeout everything is killed but what was there before: survivors, and the other sessions' shells.
        spared = processes.list_processes() if self._survivors else set()
        try:
            shell = self._shells.for_command(request.session)
        except ShellStartError as error:
            return not_started(error)
        self._shells.watch_anchor()
        # Idle shells of other sessions are no part of the command.
        others = {other.pid for other in self._shells if other is not shell}
        if spared or others:
            # The anchor goes together with its shells, unless others have to stay.
            others |= self._shells.anchor_pids
            spared |= {process for process in processes.list_processes() if process[0] in others}
        shell.run(command)
        return self._supervisor.finish_command(
            shell, request.timeout_s, lambda: self._shells.kill_except(spared, first=shell.pid)
        )

    def start_process(self, request: RunProcess, stdin: bytes, to: socket.socket) -> LocalProcess:
        """Start a process of its own under the anchor."""
        return start(self._shells, request, stdin, to)

    def become_agent(self) -> None:
        """Become the user of the sandbox's processes, in a child, with the rights that these have."""
        user = self._shells.user
        confine.stop_looking()
        if not user.is_root:
            confine.become_user(user.uid, user.gid, user.groups)

    def end_servers(self) -> None:
        """Kill everything in the sandbox but this process."""
        self._shells.kill_except(set())

    def forget_shell(self, shell: Shell, ending: str) -> None:
        """Give up a shell; one whose dump was malformed still runs."""
        if ending == "malformed":
            self._shells.kill(shell)
        else:
            self._shells.forget(shell)

    def finish_call(self, answer: CallDone, body: bytes, fresh: list[str]) -> None:
        """Send the answer; if something was written, say at once what becomes of the upper layer.

        An upper layer in which nothing differs from what lies below is thrown away, so that the sandbox is as
        recorded. Another one becomes a layer. With hard links, or nested too deeply, it cannot and stays as it is.
        """
        written = self._seals and self._changes.written and not self._survivors
        discard = written and self._changes.undone
        seal = written and not discard and not self._changes.linked and not self._changes.too_deep
        if self._survivors:
            self._shells.drop_templates()
        self._link.send(with_members(answer, discard=discard, seal=seal), body)
        if self._changes.written and not spares(self._changes.tracker.scan.signatures):
            self._shells.drop_templates()
        # The answer comes first: the proxy waits for it, and takes the next message as the state that follows it.
        if discard or seal:
            # The proxy would ask for this next. Sending it unasked saves a round trip on each call that writes. Nothing
            # survives that could have written since the call's own look.
            self._move(answer.state)
        elif not self._survivors:
            self._renew(fresh)

    def _renew(self, names: list[str]) -> None:
        """Replace the shells of some sessions; all of them, and the anchor, if the call has touched the anchor."""
        if self._shells.anchor_was_touched():
            self._shells.end()
            names = list(self._shells.sessions) or ["main"]
        self._shells.renew(names)

    def _open_terminal(self, request: OpenTerminal) -> None:
        columns, rows = request.columns, request.rows
        terminal.give(self._link, lambda: terminal.start_shell(self._shells, columns=columns, rows=rows))

    # -- states ------------------------------------------------------------------------------------------------------

    def _pause(self, *, root: bool, checkpoint: bool) -> None:
        """Get ready to be frozen, and answer `Pause`.

        1. With survivors, and a checkpoint possible: everything stays as it is; the answer names the tree to dump.
        2. With survivors otherwise, with hard links, or with directories that are nested too deeply: the answer is the
           reason why the state cannot be frozen.
        3. Otherwise the shells end, because no process may hold files of the layers that are about to change.

        Args:
            root: Whether the state becomes a root state. Hard links then break for all sandboxes alike.
            checkpoint: Whether CRIU is available.
        """
        surviving = bool(self._survivors)
        if surviving and (not checkpoint or root or (reason := self._outside_the_tree())):
            self._link.send(NotFreezable(reason if checkpoint and not root else self._survivors.description))
            return
        # Whatever was written since the last call was written by survivors.
        self._stillness.saw(wrote=self._changes.look())
        if self._changes.too_deep:
            self._link.send(NotFreezable(TOO_DEEP))
            return
        linked = self._changes.linked
        if linked and not root:
            # Over a frozen layer, a write to one name of a file copies it up under that name alone: the other names
            # keep the old content, and a later call would see the difference.
            self._link.send(NotFreezable(f"hard links would not stay one file: {', '.join(linked[:4])}"))
            return
        if surviving and self._shells.anchor is not None:
            if not self._shells.begin_checkpoint():
                self._link.send(NotFreezable("a command has ended the sandbox's anchor"))
                return
            self._held_from = time.monotonic()
            self._link.send(ProcessTree(self._shells.anchor.pid))
            return
        # Without writes the layers stay, and the shells can stay as well.
        if not self._changes.written:
            self._send_layer_state(self._supervisor.state())
            return
        self._move(self._supervisor.state())

    def _move(self, state: StateSummary) -> None:
        """Report the state of the files, which were just looked at, and go on over other layers."""
        # The sessions are dumps already, so a fresh shell on the new layers continues each of them.
        self._shells.halt()
        self._send_layer_state(state)
        # The kernel takes half a millisecond to end a shell, in which the proxy and the launcher work.
        self._shells.end()
        self._await_switch()

    def _send_layer_state(
        self, summary: StateSummary, paths: Sequence[str] = (), checkpoint: dict[str, Any] | None = None
    ) -> None:
        changes, shells = self._changes, self._shells
        stats, contents = changes.tracker.scan.manifest()
        state = LayerState(
            shells.sessions, shells.pristine, LayerManifest(stats, contents),
            [path for path in paths if changes.tracker.now.get(path.lstrip("/")) is not None],
            changes.upper_bytes, not changes.written, summary, checkpoint,
        )  # fmt: skip
        self._link.send(state, changes.tracker.table() if changes.written else b"")

    def _inspect_held(self, paths: Sequence[str]) -> None:
        """Answer `InspectHeld`: CRIU holds all processes still, so files and processes are of the same moment."""
        self._stillness.saw(wrote=self._changes.look())
        self._stillness.stood_still(time.monotonic() - self._held_from)
        if self._changes.too_deep:
            self._link.send(NotFreezable(TOO_DEEP))
            return
        # Now, because nothing can connect while CRIU holds the processes.
        if outlet.connected():
            self._link.send(NotFreezable(outlet.CONNECTED))
            return
        self._send_layer_state(
            self._supervisor.state(),
            paths,
            {
                **self._shells.remember(),
                "restless": self._stillness.restless,
                "servers": [server.remember() for server in self._servers],
                "left": [process.remember() for process in self._background],
                "pids": sorted(pid for pid, _ in processes.list_processes()),
                # A restored sandbox continues the numbering, because a command may print pids.
                "last_pid": processes.last_pid(),
            },
        )

    def _outside_the_tree(self) -> str:
        """Return why a checkpoint would not hold all that survives; empty if it would."""
        if reason := self._supervisor.outside_checkpoint():
            return reason
        anchor = self._shells.anchor
        if anchor is None or not processes.all_descend(
            lambda: (pid for pid, _ in processes.list_processes()), anchor.pid
        ):
            return "processes live that have lost the sandbox's anchor, because a command killed it"
        return ""

    def adopt(self, restored: Restored) -> None:
        """Take over what a checkpoint brought back."""
        self._stillness.saw(wrote=restored.restless)
        self._shells.adopt(restored.anchor, restored.shells)
        self._servers.adopt(restored.servers, restored.server_ends)
        for remembered, ends in restored.background:
            pid = remembered["pid"]
            process = background_process(self._shells, remembered["told"], ends, death_of(pid), pid)
            # Output that was not polled before the checkpoint is polled now.
            process.recall(remembered)
            self._background.add(process)
        self._survivors.settle(patient=False)

    def _await_switch(self) -> None:
        """Wait until the launcher has moved this mount namespace to other layers, and go on with fresh shells."""
        # The proxy orders the move when it has the state, and waits for `Done`. It sends nothing in between.
        report = self._switches.link.wait()
        if not isinstance(report.message, LayersSwitched):
            # The proxy gives this sandbox up: its layers are not known any more.
            self._link.send(report.message)
            return
        upper_mount, lower, table = report.fds
        self._changes.switched(opened_root(upper_mount), lower, table, report.message.added_bytes)
        self._link.send(Done())
        self._shells.renew(list(self._shells.sessions) or ["main"])
        self._switches.keep([upper_mount, lower])


def opened_root(mount: int) -> int:
    """Return a descriptor by which the root of a mount can be listed."""
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
