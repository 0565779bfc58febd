"""Freezing and restoring of a container, by its keeper.

Theory of operation. Without live processes a freeze is a copy of the container's own files. With live processes, CRIU
dumps the tree below the anchor's init. Pid 1 stays outside: Docker started it, and a restore happens in another
container, which has a pid 1 already. A freeze runs `freeze`, `dump` and `copy` in that order. A restore happens in a
fresh container with the copy laid over its image; `restore` has its six steps.

A process cannot enter a pid namespace, only its children are born there. That is why `_set_last_pid_inside` forks once
more.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.container.keeper import cgroup_processes
from sandboxes.container.keeper.anchor import ContainerAnchor
from sandboxes.container.keeper.background import PendingRestore
from sandboxes.container.keeper.changes import ContainerChanges
from sandboxes.container.keeper.shell_pool import ContainerShells
from sandboxes.container.keeper.tool_servers import ContainerServers
from sandboxes.guest.checkpoint_restore import PID_DISTANCE
from sandboxes.guest.criu_launch import CriuFiles, operate, set_last_pid
from sandboxes.guest.supervisor import Supervisor
from sandboxes.ipc.state_messages import Checkpoint, CopiedState, FreezeContainer, NotFreezable, ProcessTree
from sandboxes.linux import outlet, processes
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.trees import TOO_DEEP


class ContainerFreezer:
    """Freezes and restores one container."""

    def __init__(
        self,
        members: cgroup_processes.ContainerProcesses,
        anchor: ContainerAnchor,
        shells: ContainerShells,
        servers: ContainerServers,
        changes: ContainerChanges,
        supervisor: Supervisor,
    ) -> None:
        """Connect the parts of one container.

        Args:
            members: The container's processes.
            anchor: What starts its shells.
            shells: Its sessions' shells.
            servers: Its tool servers.
            changes: Its files, compared with its image.
            supervisor: What serves its requests.
        """
        self._members, self._anchor, self._shells, self._servers = members, anchor, shells, servers
        self._changes, self._supervisor = changes, supervisor
        self._background, self._survivors = supervisor.background, supervisor.survivors
        self._stillness = supervisor.stillness
        self._held_from = 0.0

    def freeze(self, request: FreezeContainer) -> NotFreezable | ProcessTree | CopiedState:
        """Copy the container's own files; with survivors, name the tree of processes that CRIU has to dump first."""
        if not self._survivors:
            return self.copy(request.folder, request.becomes)
        # 1. Everything but pid 1 must belong to the tree. Without a checkpointer, any survivor prevents a freeze.
        reason = self._outside_the_tree() if request.checkpoint else self._survivors.description
        # From here on CRIU may hold the processes, so this time does not count as time in which they ran.
        self._held_from = time.monotonic()
        return NotFreezable(reason) if reason else ProcessTree(cgroup_processes.inner_of(self._top()))

    def copy(self, folder: str, becomes: str) -> NotFreezable | CopiedState:
        """Copy the container's own files, and return the state. With survivors, CRIU holds all of them still.

        Args:
            folder: The directory to make the copy in.
            becomes: The path that the directory will have later.
        """
        # 3. The proxy requests this copy while CRIU holds the processes still, so files and memory are of the same
        # moment. Whatever was written since the last call was written by survivors.
        self._stillness.saw(wrote=self._changes.look())
        if self._survivors:
            self._stillness.stood_still(time.monotonic() - self._held_from)
        if self._changes.too_deep:
            return NotFreezable(TOO_DEEP)
        # Now, because nothing can connect while CRIU holds the processes. The keeper is in the container's network.
        if self._survivors and outlet.connected():
            return NotFreezable(outlet.CONNECTED)
        added = self._changes.copy(Path(folder), becomes)
        checkpoint = self._remember() if self._survivors else None
        shells = self._shells
        return CopiedState(shells.sessions, shells.pristine, added, self._supervisor.state(), checkpoint)

    def dump(self, arguments: list[str], fds: list[int]) -> None:
        """Start CRIU, to dump the container's processes. The descriptors are closed here."""
        # 2. The fork enters the container's namespaces and starts CRIU there. The proxy talks to CRIU itself, over
        # `reply`.
        if os.fork() == 0:
            # `operate` never returns: it ends the fork together with CRIU.
            self._enter()
            operate(CriuFiles(*fds), arguments, restores=False)
        close_all(fds)

    def restore(
        self, checkpoint: Checkpoint, arguments: list[str], fds: list[int], await_restored: Callable[[], None]
    ) -> None:
        """Replace the container's processes by those of a checkpoint, and take these over.

        Args:
            checkpoint: What was remembered of the processes.
            arguments: CRIU's arguments.
            fds: `ns_last_pid`, then the `CriuFiles`; they are closed here.
            await_restored: Returns when the proxy says that CRIU has restored the processes.

        Raises:
            OSError: The pids of the fresh processes do not become free.
        """
        # Step 1. The fresh anchor has the pid that the restored one needs. Pid 1 stays: it starts another anchor only
        # when a line arrives on `again`, and the restored anchor needs no other. The init goes last: it reaps the
        # others, and pid 1 may reap no process but its own child.
        self._members.kill_except({self._members.pid, self._top()})
        self._members.kill_except({self._members.pid})
        self._members.await_reaped()
        # Step 2. CRIU opens FIFOs by their paths, so all of them must exist before it runs. They stay open at the
        # keeper's end, so that no open blocks.
        shells = self._shells.prepare_again(checkpoint["shells"])
        self._servers.prepare_again(checkpoint.get("servers", []))
        background = [PendingRestore(stored, self._anchor.box) for stored in checkpoint.get("left", [])]
        last_pid, *files = fds
        # Steps 3 and 4, the next pid and CRIU, happen in a fork, because entering namespaces cannot be undone in this
        # process.
        last = max(checkpoint["pids"])
        operator = os.fork()
        if operator == 0:
            # The limits of the container apply to what CRIU restores, because children stay in their parent's groups.
            cgroup_processes.join(self._members.pid)
            self._enter()
            # The kernel numbers on from the last pid, so the helpers of CRIU stay out of the way of the restored pids.
            _set_last_pid_inside(last_pid, last + PID_DISTANCE)
            os.close(last_pid)
            operate(CriuFiles(*files), arguments, restores=True)
        # The fork has its own copies. While this process held the reply socket, the proxy could not see CRIU's end.
        close_all(files)
        await_restored()
        os.waitpid(operator, 0)
        # Step 5. Set the next pid back. A command may print pids, and a restored sandbox must print the same ones as
        # the original.
        self._continue_pids_from(last, last_pid)
        os.close(last_pid)
        # Step 6. Find the restored processes by their inner pids. The anchor comes first: shells and servers are found
        # as its children.
        self._anchor.adopt(checkpoint["anchor"])
        self._stillness.saw(wrote=checkpoint["restless"])
        self._shells.adopt_prepared(shells, checkpoint["shells"])
        self._servers.adopt_prepared()
        for process in background:
            self._background.add(process.adopted(self._members, self._shells.status_of))
        # The processes were settled when they were dumped, so nothing has to be waited for.
        self._survivors.settle(patient=False)

    def _continue_pids_from(self, last: int, last_pid: int) -> None:
        """Set the container's next pid to what it would be without CRIU's helpers."""
        after = os.fork()
        if after == 0:
            self._enter()
            _set_last_pid_inside(last_pid, last)
            os._exit(0)
        os.waitpid(after, 0)

    def _enter(self) -> None:
        """In a fork: enter the container's namespaces. The fork's children are born in its pid namespace."""
        try:
            every = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
            kernel.setns(self._members.init, every | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP)
            os.chdir("/")
        except OSError:
            # The fork must never return into the keeper's code.
            os._exit(1)

    def _outside_the_tree(self) -> str:
        """Return why a checkpoint would miss a process or object of the container; empty if it holds everything."""
        if why := self._supervisor.outside_checkpoint():
            return why

        # A new list for each look, because processes start and end meanwhile.
        def others() -> set[int]:
            return {pid for pid, _ in self._members.running()} - {self._members.pid}

        if not processes.all_descend(others, self._top()):
            return (
                "processes run outside the tree of the container's anchor: this machine has no tini, or it was killed"
            )
        # Idle shells must wait at their FIFO, not be on the way there, so that a restored one continues the same way.
        self._shells.ready_all()
        return ""

    def _top(self) -> int:
        """Return the root of the tree of all processes but pid 1: the anchor's init, or the anchor if there is none."""
        anchor = self._anchor
        return next(iter(anchor.pids - {self._members.pid, anchor.pid}), anchor.pid)

    def _remember(self) -> dict[str, Any]:
        """Return what another keeper needs to adopt the processes; it is stored with the snapshot."""
        return {
            **self._shells.remember(),
            "servers": [server.remember() for server in self._servers],
            "restless": self._stillness.restless,
            "left": [process.remember() for process in self._background],
            "pids": sorted(cgroup_processes.inner_of(pid) for pid, _ in self._members.running()),
        }


def _set_last_pid_inside(last_pid: int, number: int) -> None:
    """Set the last pid of the pid namespace that this process has entered, in a child that belongs to it."""
    pid = os.fork()
    if pid == 0:
        try:
            # The container's processes see this child, so it has no descriptor of the keeper's directories.
            kernel.arrange_descriptors({0: last_pid})
            set_last_pid(0, number)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
