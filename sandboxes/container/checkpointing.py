"""A container's state out and in, with its processes by a CRIU that the driver talks to. Seen from its keeper."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.container import cgroup_processes as household
from sandboxes.container.anchor import ContainerAnchor
from sandboxes.container.background import PendingRestore
from sandboxes.container.changes import ContainerChanges
from sandboxes.container.shell_pool import ContainerShells
from sandboxes.container.tool_servers import ContainerServers
from sandboxes.guest.background import AllLeft
from sandboxes.guest.changes import Stillness
from sandboxes.guest.checkpoint_restore import OUT_OF_THE_WAY
from sandboxes.guest.criu_launch import operate, set_last_pid
from sandboxes.guest.supervisor import state_of
from sandboxes.guest.survivors import Alive
from sandboxes.linux import processes
from sandboxes.linux import syscalls as kernel


@dataclass(frozen=True)
class Parts:
    """What a container's keeper has of it."""

    house: household.Household
    anchor: ContainerAnchor
    shells: ContainerShells
    servers: ContainerServers
    left: AllLeft
    alive: Alive
    changes: ContainerChanges
    stillness: Stillness

    def state(self) -> dict[str, Any]:
        """Return what every answer tells of the state."""
        return state_of(self.changes, self.shells, self.alive, self.stillness)


class Freezing:
    """One container's. Methods return what the driver is told."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._held_from = 0.0

    def freeze(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Copy the container's own files to an empty directory.

        Where something lives, name the process whose tree can be dumped; `copy` is to follow then.
        """
        if not self._parts.alive:
            return self.copy(fields)
        why = self._outside_the_tree() if fields["checkpoint"] else self._parts.alive.who
        self._held_from = time.monotonic()
        return {"not_freezable": why} if why else {"tree": household.inner_of(self._top())}

    def copy(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Copy the files, while all that lives stands still, and tell what must be known of it."""
        parts = self._parts
        parts.stillness.saw(wrote=parts.changes.look())
        if parts.alive:
            parts.stillness.stood_still(time.monotonic() - self._held_from)
        added = parts.changes.copy(Path(fields["folder"]), fields["becomes"])
        return {
            "sessions": parts.shells.sessions,
            "pristine": parts.shells.pristine,
            "added_bytes": added,
            **parts.state(),
            "delta": parts.changes.now,
            "checkpoint": self._remember() if parts.alive else None,
        }

    def dump(self, program: list[str], fds: list[int]) -> dict[str, Any]:
        """Start a CRIU that dumps what lives."""
        reply, host_root, *files = fds
        if os.fork() == 0:
            self._enter()
            operate(host_root, program, reply, files, survey=True)
        for fd in fds:
            os.close(fd)
        return {}

    def bring_back(
        self, checkpoint: dict[str, Any], program: list[str], fds: list[int], await_restored: Callable[[], None]
    ) -> dict[str, Any]:
        """Have a CRIU restore what lived, in the place of what lives here, and take it over.

        await_restored: returns when the driver says that CRIU has done its part.
        """
        parts = self._parts
        parts.house.kill_except({parts.house.pid})
        shells = parts.shells.prepare_again(checkpoint["shells"])
        parts.servers.prepare_again(checkpoint.get("servers", []))
        left = [PendingRestore(told, parts.anchor.box) for told in checkpoint.get("left", [])]
        reply, host_root, *files = fds
        last = max(checkpoint["pids"])
        operator = os.fork()
        if operator == 0:
            household.join(parts.house.pid)
            self._enter()
            _in_child(lambda: set_last_pid(host_root, last + OUT_OF_THE_WAY))
            operate(host_root, program, reply, files)
        for fd in (reply, *files):
            os.close(fd)
        await_restored()
        os.waitpid(operator, 0)
        self._go_on_from(last, host_root)
        os.close(host_root)
        parts.anchor.adopt(checkpoint["anchor"])
        parts.stillness.saw(wrote=checkpoint["restless"])
        parts.shells.adopt_prepared(shells, checkpoint["shells"])
        parts.servers.adopt_prepared()
        for process in left:
            parts.left.add(process.adopted(parts.house, parts.shells.status_of))
        parts.alive.settle(patient=False)
        return {}

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
            kernel.setns(self._parts.house.init, every | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP)
            os.chdir("/")
        except OSError:
            os._exit(1)

    def _outside_the_tree(self) -> str:
        """Say what lives here that no checkpoint would hold; empty where there is nothing."""
        parts = self._parts
        if parts.alive.has_ipc_objects:
            return "System V IPC objects exist, and a checkpoint does not hold them"
        if why := parts.left.outside:
            return why

        def others() -> set[int]:
            return {pid for pid, _ in parts.house.living()} - {parts.house.pid}

        if not processes.all_descend(others, self._top()):
            return (
                "processes live outside the tree of the container's anchor: this machine has no tini, or it was killed"
            )
        parts.shells.ready_all()
        return ""

    def _top(self) -> int:
        """Return the root of the tree that holds all but pid 1."""
        anchor = self._parts.anchor
        return next(iter(anchor.pids - {self._parts.house.pid, anchor.pid}), anchor.pid)

    def _remember(self) -> dict[str, Any]:
        """Return what must be known of the processes to take them over in another container."""
        parts = self._parts
        return {
            **parts.shells.remember(),
            "servers": [server.remember() for server in parts.servers],
            "restless": parts.stillness.restless,
            "left": [process.remember() for process in parts.left],
            "pids": sorted(household.inner_of(pid) for pid, _ in parts.house.living()),
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
