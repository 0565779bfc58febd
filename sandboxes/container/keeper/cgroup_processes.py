"""The processes of a container, seen from outside through its control group, by the pids of this machine.

A process cannot leave its control group without rights that containers lack, so the group lists every process, whatever
it forks, and whatever namespaces it makes. Each process also has an *inner* pid, by which the container knows it.
"""

import errno
import os
import signal
import time
from pathlib import Path

from sandboxes.linux import cgroups, processes
from sandboxes.linux.processes import Process

KILL_S = 10.0
"""Longest attempt to kill all processes. Each round leaves fewer, so this is reached only if the kernel is stuck.

The value is an estimate.
"""

_PF_EXITING = 0x4
"""The flag of a process that has begun to exit (Linux, include/linux/sched.h)."""


class ContainerProcesses:
    """The processes of one container.

    Attributes:
        pid: Its pid 1, as this machine numbers it.
        init: The process descriptor of its pid 1.
    """

    def __init__(self, pid: int, container: str) -> None:
        """Find the control group of a container.

        Args:
            pid: Its pid 1.
            container: Docker's id of it, which is part of the group's path.

        Raises:
            OSError: The container is gone, or the pid belongs to another process by now.
        """
        self.pid = pid
        # The descriptor comes before the check of the control group: from here on it names this process, even if the
        # pid is given away.
        self.init = os.pidfd_open(pid)
        self._procs = _members_file(pid, container)

    def pids(self) -> list[int]:
        """Return the pids of all processes of the container, zombies included."""
        try:
            # Opened each time: cgroup v1 returns the same list again when one descriptor is read twice.
            with open(self._procs, "rb") as file:  # noqa: PTH123 - many times a call
                data = file.read()
        except OSError:
            # The group is gone, and all processes with it.
            return []
        return [int(pid) for pid in data.split()]

    def running(self) -> set[Process]:
        """Return the processes that have not ended, with their start times; 0.03 ms each."""
        return {(pid, started) for pid in self.pids() if (started := start_time(pid)) is not None}

    def find(self, inner: int) -> int | None:
        """Return the pid of the process with an inner pid; None if there is none."""
        # A container has few processes, so the search is linear. A table would be stale after each fork. The newest one
        # is looked for most often, and the kernel lists it last.
        for pid in reversed(self.pids()):
            if inner_of(pid) == inner:
                return pid
        return None

    def kill_except(self, spared: set[int], first: int | None = None) -> None:
        """Kill all processes of the container, however fast they fork.

        Args:
            spared: Pids that are not killed.
            first: A pid that is killed before the others; None if the order does not matter.
        """
        # The caller's `first` is the shell of a call that timed out: it must not start another command while the others
        # are killed.
        if first is not None:
            kill(first)
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            # The list is taken again in each round: a process that forked before its SIGSTOP has a child that no
            # earlier list had. Zombies are left out, as only their parent can remove them.
            doomed = {pid for pid, _ in self.running()} - spared
            if not doomed:
                return
            # A stopped process cannot fork, so each round leaves fewer processes that can.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in doomed:
                    kill(pid, number)
            # SIGKILL is delivered when the process next runs, so a killed process stays in the group for a moment.
            time.sleep(0.0005)

    def await_reaped(self) -> None:
        """Wait until the pids of all ended processes are free again; their parents have to reap them first.

        Raises:
            OSError: It takes longer than `KILL_S`.
        """
        deadline = time.monotonic() + KILL_S
        # No control group lists zombies (cgroups(7)), but the container's own /proc does.
        while any(name.isdigit() and name != "1" for name in os.listdir(f"/proc/{self.pid}/root/proc")):  # noqa: PTH208
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "ended processes of the container are not reaped by its pid 1")
            time.sleep(0.0005)

    def written_paths(self) -> set[str]:
        """Return the paths, relative to the root, of the files that a process has open for writing."""
        return processes.written_paths(self.pids())


def inner_of(pid: int) -> int:
    """Return the inner pid of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123 - many times a call
            # NSpid lists the numbers from the outermost namespace to the innermost one (proc_pid_status(5)).
            return int(next(line for line in file if line.startswith(b"NSpid:")).split()[-1])
    except (OSError, StopIteration):
        return 0


def join(pid: int) -> None:
    """Move this process into all control groups of another one, so that the limits of these groups apply to it."""
    # Version 1 has a hierarchy for each set of controllers, version 2 has a single one with an empty name (cgroups(7)).
    # Machines may mount both.
    mounts = {name: mount for names, mount in cgroups.hierarchies() for name in names}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if path == "/" or (mount := mounts.get(kinds.split(",")[0])) is None:
            continue
        # 0 stands for the process that writes (cgroups(7)).
        (mount / path.lstrip("/") / "cgroup.procs").write_text("0")


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended."""
    fields = processes.stat_fields(pid)
    # Field 22 is the start time (proc_pid_stat(5)).
    return None if fields is None or processes.has_ended(fields) else int(fields[19])


def exiting(pid: int) -> bool:
    """Return whether a process has ended or is ending. A pid 1 is ending before its container's others are killed."""
    fields = processes.stat_fields(pid)
    # Field 9, the kernel's flags of the process.
    return fields is None or bool(int(fields[6]) & _PF_EXITING)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    try:
        # A pid is signalled here, not a descriptor, because opening a descriptor for each member would cost two more
        # system calls a process.
        os.kill(pid, number)
    except ProcessLookupError:
        return


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with, as latin-1 text."""
    # This is the environment at exec; later changes of the process do not show (proc_pid_environ(5)). Latin-1 keeps
    # every byte.
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode("latin-1").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def ids(pid: int) -> tuple[int, int, list[int]]:
    """Return the user id, the group id and the further group ids of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    # The second number is the effective id (proc_pid_status(5)).
    return int(fields["Uid"].split()[1]), int(fields["Gid"].split()[1]), [int(gid) for gid in fields["Groups"].split()]


def _members_file(pid: int, container: str) -> str:
    """Return the path of `cgroup.procs` in a container's group, of cgroup version 1 or 2."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    # Docker puts the container's id into the path. A pid that was given to another process meanwhile has a path without
    # it.
    groups = {name: path for _, kinds, path in lines if container in path for name in kinds.split(",")}
    # Each container has a group of `pids`. sorted() is stable and False sorts before True, so that hierarchy is first.
    for names, mount in sorted(cgroups.hierarchies(), key=lambda entry: "pids" not in entry[0]):
        for name in {"pids", "memory", ""}.intersection(names):
            if name in groups and Path(members := f"{mount}{groups[name]}/cgroup.procs").exists():
                return members
    raise ProcessLookupError(
        3, f"process {pid} does not belong to container {container[:12]}, or control groups are not visible here"
    )
