"""Pid 1 of a sandbox that has started: it answers requests, and freezes states by layers."""

import os
import time
from collections.abc import Sequence
from typing import Any

from sandboxes.guest import terminal
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.anchors.template import spares
from sandboxes.guest.background import BackgroundProcesses
from sandboxes.guest.checkpoints import mapped_locks
from sandboxes.guest.checkpoints.restore import Restored
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.files import delta
from sandboxes.guest.files.changes import Changes
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.guest.process_call import background_process
from sandboxes.guest.shells import Shells
from sandboxes.guest.supervisor import CallRequest, Supervisor
from sandboxes.guest.survivors import OUTSIDE_IPC, outside_ipc, unsaved_segments
from sandboxes.guest.tool_servers import Servers
from sandboxes.ipc.codec import Envelope, IpcMessage, with_members
from sandboxes.ipc.fork_pages import own_pages
from sandboxes.ipc.messages import DescribeState, Done, ExpectCourse, OpenTerminal, StateSummary
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
from sandboxes.linux import outlet, processes
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.processes import death_of
from sandboxes.linux.sandbox_groups import GroupFiles
from sandboxes.linux.socket_queues import SocketQueues
from sandboxes.linux.trees import TOO_DEEP


class Switches:
    """The socket on which switches of layers are reported, and the mounts that came with the last report."""

    def __init__(self, link: DriverLink, mounts: list[int]) -> None:
        self.link, self._mounts = link, mounts

    def keep(self, mounts: list[int]) -> None:
        """Keep other mounts open, and close those of the layers that the sandbox has left."""
        # The last descriptor of a mount unmounts it. That waits for the kernel's readers (RCU), so it comes last.
        before, self._mounts = self._mounts, mounts
        close_all(before)


class PidOne:
    """Answers the requests of one sandbox: calls through the supervisor, and what concerns its state here."""

    def __init__(
        self,
        link: DriverLink,
        switches: Switches,
        roots: delta.DeltaRoots,
        order: StartSandbox,
        rows: StateRows,
        sockets: SocketQueues | None,
        groups: GroupFiles,
        shells: Shells,
    ) -> None:
        self._link, self._switches, self._seals = link, switches, order.seals
        self._keeps_locks = order.keeps_locks
        self._shells = shells
        self._changes, self._background = Changes(roots, order, rows), BackgroundProcesses(order.output_bytes)
        self._servers = Servers(shells)
        self._supervisor = Supervisor(link, shells, self._servers, self._background, self._changes, sockets, groups)
        self._survivors, self._stillness = self._supervisor.survivors, self._supervisor.stillness
        self._held_from, self._has_segments = 0.0, False

    def serve(self, handed_over: list[int], *, begun: bool, broken: str | None = None) -> None:
        """Report that the sandbox has started, then answer requests until the proxy is gone."""
        # The descriptors that are handed over are closed here: the mount namespace, by which the launcher will switch
        # layers, and with egress the listening socket. If the first shell was begun, only the first call waits for it.

        # Processes that came back, the anchor too, may stand still: their first call starts a shell that is missing.
        if not (begun or broken) and self._shells.anchor is None:
            broken = self._begin_first()
        started = SandboxStarted(broken, self._supervisor.state(), self._shells.pristine)
        self._link.hand_over(started, handed_over)
        if begun:
            self._shells.renew(["main"])
        while (envelope := self._supervisor.next_request()) is not None:
            match request := envelope.message:
                case StartServers() | ExpectCourse() | DescribeState():
                    self._supervisor.answer(request)
                case Pause():
                    self._pause(root=request.root, checkpoint=request.checkpoint)
                case InspectHeld():
                    self._inspect_held(request.paths)
                case ListPages():
                    self._link.send(PagesListed(own_pages()))
                case OpenTerminal():
                    terminal.give(self._link, self._shells, columns=request.columns, rows=request.rows)
                case _ if isinstance(request, CallRequest):
                    self._call(request, envelope)

    def _begin_first(self) -> str | None:
        """Start the main shell; return why it does not start if a command, or the base, has broken it."""
        try:
            self._shells.ready("main")
        except ShellStartError as error:
            if not error.broken:
                raise
            return str(error)
        return None

    def _call(self, request: CallRequest, envelope: Envelope[IpcMessage]) -> None:
        """Run a call and send the answer; if something was written, say at once what becomes of the upper layer."""
        # An upper in which nothing differs from what lies below is thrown away, so that the sandbox is as recorded.
        # Another one becomes a layer, but not with hard links that would break, or nested too deeply.
        if (done := self._supervisor.call(request, envelope)) is None:
            return
        answer, body, fresh = done
        written = self._seals and self._changes.written and not self._survivors
        discard = written and self._changes.undone
        seal = written and not discard and not self._changes.breaking and not self._changes.too_deep
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

    # -- states ------------------------------------------------------------------------------------------------------

    def _pause(self, *, root: bool, checkpoint: bool) -> None:
        """Get ready to be frozen, and answer `Pause`.

        1. With survivors, and a checkpoint possible: everything stays as it is; the answer names the tree to dump.
        2. With survivors otherwise, with hard links that would break, or with directories that are nested too deeply:
           the answer is the reason why the state cannot be frozen. In the root state hard links may break: they do so
           for all sandboxes.
        3. Otherwise the shells end, because no process may hold files of the layers that are about to change.
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
        if (linked := self._changes.breaking) and not root:
            # Over a frozen layer without an index, a write to one name of a file copies it up under that name alone:
            # the other names keep the old content, and a later call would see the difference.
            self._link.send(NotFreezable(f"these hard links would not stay one file: {', '.join(linked[:4])}"))
            return
        if surviving and self._shells.anchor is not None:
            if not self._shells.begin_checkpoint():
                self._link.send(NotFreezable("a command has ended the sandbox's anchor"))
                return
            self._held_from, self._has_segments = time.monotonic(), bool(processes.ipc_objects("shm"))
            self._link.send(ProcessTree(self._shells.anchor.pid, self._has_segments))
            return
        # Without writes the layers stay, and the shells can stay as well.
        if not self._changes.written:
            self._send_layer_state(self._supervisor.state())
            return
        self._move(self._supervisor.state())

    def _move(self, state: StateSummary) -> None:
        # The sessions are dumps already, so a fresh shell on the new layers continues each of them.
        self._shells.halt()
        if self._changes.links:
            # The kernel takes no mount's upper directory below an overlay with an index, and the old view of what lies
            # below is a mount of one.
            self._switches.keep([])
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
            changes.upper_bytes, not changes.written, changes.links, summary, checkpoint,
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
        pids = [pid for pid, _ in processes.list_processes()]
        locks = mapped_locks.held(pids)
        if locks is None or (locks and not self._keeps_locks):
            self._link.send(NotFreezable(mapped_locks.REASON))
            return
        # What exists may have come since the last call, or since CRIU was started.
        reason = OUTSIDE_IPC if outside_ipc() else unsaved_segments(pids)
        if reason or bool(processes.ipc_objects("shm")) != self._has_segments:
            self._link.send(NotFreezable(reason or "System V shared memory came or went"))
            return
        anchor = self._shells.anchor
        assert anchor is not None
        self._send_layer_state(
            self._supervisor.state(),
            paths,
            {
                "anchor": anchor.remember(),
                "shells": [shell.remember() for shell in self._shells],
                "has_segments": self._has_segments,
                "restless": self._stillness.restless,
                "servers": [server.remember() for server in self._servers],
                "left": [process.remember() for process in self._background],
                "locks": locks,
                "pids": sorted(pid for pid, _ in processes.list_processes()),
                # A restored sandbox continues the numbering, because a command may print pids.
                "last_pid": processes.last_pid(),
            },
        )

    def _outside_the_tree(self) -> str:
        if reason := self._supervisor.outside_checkpoint():
            return reason
        anchor = self._shells.anchor
        if anchor is None or not processes.all_descend(
            lambda: (pid for pid, _ in processes.list_processes()), anchor.pid
        ):
            return "processes live that have lost the sandbox's anchor, because a command killed it"
        # Looked at once more while CRIU holds the processes.
        locks = [] if self._keeps_locks else mapped_locks.held([pid for pid, _ in processes.list_processes()])
        return "" if locks == [] else mapped_locks.REASON

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
        # The proxy orders the move when it has the state, and waits for `Done`. It sends nothing in between.
        report = self._switches.link.wait()
        if not isinstance(report.message, LayersSwitched):
            # The proxy has moved nothing, or it gives this sandbox up: its layers are not known any more.
            self._link.send(report.message)
            return
        upper_mount, lower, table = report.fds
        self._changes.switched(opened_root(upper_mount), lower, table, report.message)
        self._link.send(Done())
        self._shells.renew(list(self._shells.sessions) or ["main"])
        self._switches.keep([upper_mount, lower])


def opened_root(mount: int) -> int:
    """Return a descriptor by which the root of a mount can be listed."""
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
