"""A container's state out and in, with its processes by a CRIU that the driver talks to. Seen from its keeper."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.container import cgroup_processes as household
from sandboxes.container.anchor import ContainerAnchor
from sandboxes.container.background import PendingRestore
from sandboxes.container.changes import ContainerChanges
from sandboxes.container.shell_pool import ContainerShells
from sandboxes.container.tool_servers import ContainerServers
from sandboxes.guest.checkpoint_restore import PID_DISTANCE
from sandboxes.guest.criu_launch import operate, set_last_pid
from sandboxes.guest.supervisor import Supervisor
from sandboxes.ipc.state_messages import Checkpoint, CopiedState, FreezeContainer, NotFreezable, ProcessTree
from sandboxes.linux import processes
from sandboxes.linux import syscalls as kernel


class Freezing:
    """Freezes and restores one container."""

    def __init__(
        self,
        house: household.Household,
        anchor: ContainerAnchor,
        shells: ContainerShells,
        servers: ContainerServers,
        changes: ContainerChanges,
        supervisor: Supervisor,
    ) -> None:
        self._house, self._anchor, self._shells, self._servers = house, anchor, shells, servers
        self._changes, self._supervisor = changes, supervisor
        self._background, self._survivors = supervisor.background, supervisor.survivors
        self._stillness = supervisor.stillness
        self._held_from = 0.0

    def freeze(self, request: FreezeContainer) -> NotFreezable | ProcessTree | CopiedState:
        """Copy the container's own files; with survivors, name the tree of processes that CRIU has to dump first."""
        if not self._survivors:
            return self.copy(request.folder, request.becomes)
        reason = self._outside_the_tree() if request.checkpoint else self._survivors.description
        self._held_from = time.monotonic()
        return NotFreezable(reason) if reason else ProcessTree(household.inner_of(self._top()))

    def copy(self, folder: str, becomes: str) -> CopiedState:
        """Copy the container's own files, and return the state. With survivors, CRIU holds all of them still.

        Args:
            folder: The directory to make the copy in.
            becomes: The path that the directory will have later.
        """
        self._stillness.saw(wrote=self._changes.look())
        if self._survivors:
            self._stillness.stood_still(time.monotonic() - self._held_from)
        added = self._changes.copy(Path(folder), becomes)
        checkpoint = self._remember() if self._survivors else None
        shells = self._shells
        return CopiedState(shells.sessions, shells.pristine, added, self._supervisor.state(), checkpoint)

    def dump(self, program: list[str], fds: list[int]) -> None:
        """Start CRIU, to dump the container's processes. The descriptors are closed here."""
        reply, host_root, *files = fds
        if os.fork() == 0:
            self._enter()
            operate(host_root, program, reply, files, survey=True)
        for fd in fds:
            os.close(fd)

    def bring_back(
        self, checkpoint: Checkpoint, program: list[str], fds: list[int], await_restored: Callable[[], None]
    ) -> None:
        """Replace the container's processes by those of a checkpoint, and take these over.

        Args:
            checkpoint: What was remembered of the processes.
            program: CRIU and its arguments.
            fds: A socket to the proxy, the host's root, the images and the kernel features; they are closed here.
            await_restored: Returns when the proxy says that CRIU has restored the processes.
        """
        self._house.kill_except({self._house.pid})
        shells = self._shells.prepare_again(checkpoint["shells"])
        self._servers.prepare_again(checkpoint.get("servers", []))
        background = [PendingRestore(told, self._anchor.box) for told in checkpoint.get("left", [])]
        reply, host_root, *files = fds
        last = max(checkpoint["pids"])
        operator = os.fork()
        if operator == 0:
            household.join(self._house.pid)
            self._enter()
            _in_child(lambda: set_last_pid(host_root, last + PID_DISTANCE))
            operate(host_root, program, reply, files)
        for fd in (reply, *files):
            os.close(fd)
        await_restored()
        os.waitpid(operator, 0)
        self._go_on_from(last, host_root)
        os.close(host_root)
        self._anchor.adopt(checkpoint["anchor"])
        self._stillness.saw(wrote=checkpoint["restless"])
        self._shells.adopt_prepared(shells, checkpoint["shells"])
        self._servers.adopt_prepared()
        for process in background:
            self._background.add(process.adopted(self._house, self._shells.status_of))
        self._survivors.settle(patient=False)

    def _go_on_from(self, last: int, host_root: int) -> None:
        """Have the container's next pid be what it would have been."""
        after = os.fork()
        if after == 0:
            self._enter()
            _in_child(lambda: set_last_pid(host_root, last))
            os._exit(0)
        os.waitpid(after, 0)

    def _enter(self) -> None:
        """In a fork: move into the container's namespaces; children are born in its pid namespace."""
        try:
            every = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
            kernel.setns(self._house.init, every | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP)
            os.chdir("/")
        except OSError:
            os._exit(1)

    def _outside_the_tree(self) -> str:
        """Say what lives here that no checkpoint would hold; empty where there is nothing."""
        if self._survivors.has_ipc_objects:
            return "System V IPC objects exist, and a checkpoint does not hold them"
        if why := self._background.outside_checkpoint:
            return why

        def others() -> set[int]:
            return {pid for pid, _ in self._house.living()} - {self._house.pid}

        if not processes.all_descend(others, self._top()):
            return (
                "processes live outside the tree of the container's anchor: this machine has no tini, or it was killed"
            )
        self._shells.ready_all()
        return ""

    def _top(self) -> int:
        """Return the root of the tree that holds all but pid 1."""
        anchor = self._anchor
        return next(iter(anchor.pids - {self._house.pid, anchor.pid}), anchor.pid)

    def _remember(self) -> dict[str, Any]:
        """Return what must be known of the processes to take them over in another container; a disk format."""
        return {
            **self._shells.remember(),
            "servers": [server.remember() for server in self._servers],
            "restless": self._stillness.restless,
            "left": [process.remember() for process in self._background],
            "pids": sorted(household.inner_of(pid) for pid, _ in self._house.living()),
        }


def _in_child(work: Callable[[], None]) -> None:
    """Do work in a child, which is born in another pid namespace than this process is in."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
