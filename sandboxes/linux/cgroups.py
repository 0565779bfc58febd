"""Control groups: limits for the processes of a sandbox, and a small CPU weight for those of all sandboxes together.

Theory of operation. Version 1 has a hierarchy for each controller, so a sandbox has groups for memory, pids and CPU
time. Version 2 has one hierarchy, in which a group with processes of its own cannot enable a controller for its
children (Linux, Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint"). The proxy's own group has
at least the proxy in it. Where that group is ours, delegated by systemd or the root of a container, all its processes
move into a group below it, `PROXY_GROUP`, beside the sandboxes' groups. Anywhere else the root of the hierarchy, which
is exempt, is the choice.

The proxy makes one group for itself, and in it one for each sandbox. Where no hierarchy is writable, every method does
nothing and the driver falls back to resource limits of single processes.

The CPU weight of all sandboxes together lets the proxy run first: without it, a hit waits behind everything that misses
run. Version 2 gives the weight to the proxy's group. Version 1 has a hierarchy of its own for it, with a group that the
launcher joins. Among themselves sandboxes have equal weights, however many processes each of them runs.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sandboxes.linux import syscalls as kernel

UNLIMITED = 1 << 62
_OWN_PIDS = 2
"""Processes of ours that are in the group too, pid 1 and a template: agents would have so many fewer."""
MEMORY, PIDS, CPU = "memory", "pids", "cpu"
_ACCOUNTS, _DISKS = "cpuacct", "io"
"""The controllers that count CPU time (version 1; in version 2 each group does) and bytes of disks (version 2)."""
PROXY_GROUP = "forkpoint-proxy"
"""The group below a delegated group that has the delegated group's own processes. It stays as long as they do."""
_DELEGATED = ("trusted.delegate", "user.delegate")
"""The attributes with which systemd marks a group that it leaves to its processes. Users can read the second."""
_MOVES = 100
"""How often a group is looked through for processes, which may fork while they are moved."""
_SHARES_PER_CORE = 512
"""CPU weight of all sandboxes together, for each core (version 1); an ordinary process has 1024 on its core. Half: a
busy process beside the sandboxes takes two thirds of its core. With half of it, agents' commands run into their
timeouts where other programs keep all cores busy. With twice as much, hits wait behind misses as without a weight."""
_WEIGHT = 50
"""The same for version 2, where each group beside it, such as all services together, has 100."""
_PERIOD_US, _LEAST_QUOTA_US = 100_000, 1_000
"""The period of a CPU quota, which is the kernel's default, and the least quota that it takes (sched-bwc.rst)."""
_SWEEP_S = 5.0
"""Longest time that a sweep waits for killed processes. They end in milliseconds, unless they wait for a dead disk."""
_POLL_S = 0.005
_FROZEN = "frozen"
"""The group of a sandbox's processes that can be frozen, below the sandbox's own (version 2)."""
_STILL_S, _STILL_POLL_S = 5.0, 0.0005
"""How long processes may take until they stand still, and how often that is looked at. It takes a millisecond, unless
one waits for a dead disk."""


class Cgroups:
    """The groups of this instance."""

    def __init__(self, name: str) -> None:
        self.name = name  # The name of this instance's group.
        self.version = 0  # 1 or 2; 0 before `open` found a hierarchy.
        self.parents: dict[str, Path] = {}  # This instance's group by controller; empty if no hierarchy is writable.
        # The group with the small CPU weight that `put_behind` fills; None with version 2, which needs none.
        self.behind: Path | None = None
        # The group in which each sandbox has a CPU group of its own; None if it cannot be written.
        self.cpu: Path | None = None
        # The group in which the CPU time of each sandbox is counted (version 1); None where it is not.
        self.accounts: Path | None = None
        # The group of version 2 in which each sandbox has one for the processes that can be frozen; None where none
        # can.
        self.freezer: Path | None = None
        self.problem = ""  # Why no hierarchy is writable; empty if one is.

    def open(self) -> None:
        """Make this instance's group, or set `problem`."""
        try:
            hierarchy = _find_hierarchy()
        except OSError as error:
            self.problem = str(error)
            return
        if hierarchy is None:
            self.problem = "neither a version 2 nor a version 1 hierarchy with memory and pids is mounted"
            return
        self.version, candidates = hierarchy
        for groups in candidates:
            try:
                _make_writable(groups)
                self.parents = self._make_below(groups)
            except OSError as error:
                # A write that the kernel refuses has no name of a file.
                self.problem = f"{error.filename or groups[MEMORY]}: {error.strerror}"
                self.close()
            else:
                self.problem = ""
                # Without a weight, sandboxes run all the same; hits then wait longer beside misses.
                with contextlib.suppress(OSError, KeyError):
                    self._weigh_sandboxes(groups)
                with contextlib.suppress(OSError):
                    self._separate_sandboxes()
                # Without accounts, nobody knows what a call has used.
                with contextlib.suppress(OSError, KeyError):
                    self._account_sandboxes(groups)
                # Without a freezer, specs that need it are refused.
                with contextlib.suppress(OSError, KeyError):
                    self._find_freezer()
                return

    def _make_below(self, groups: dict[str, Path]) -> dict[str, Path]:
        for controller, group in groups.items():
            if self.version == 2 and _is_ours(group):
                _move_processes(group, group / PROXY_GROUP)
            parent = group / self.name
            parent.mkdir(exist_ok=True)
            self.parents[controller] = parent
            if self.version == 2:
                _enable_controllers(group)
                _enable_controllers(parent)
                return {MEMORY: parent, PIDS: parent}
        return self.parents

    def _weigh_sandboxes(self, groups: dict[str, Path]) -> None:
        if self.version == 2:
            _enable_controllers(groups[MEMORY], CPU)
            (self.parents[MEMORY] / "cpu.weight").write_text(str(_WEIGHT))
            return
        # Two levels, so that `sweep`, which kills what is in the groups below a group, finds the processes.
        own = self._place_in(CPU)
        (own / "sandboxes").mkdir(exist_ok=True)
        self.cpu, self.behind = own, own / "sandboxes"
        (own / "cpu.shares").write_text(str(_SHARES_PER_CORE * (os.cpu_count() or 1)))

    def _separate_sandboxes(self) -> None:
        """Give each sandbox a CPU group of its own in version 2; in version 1 it has one beside `behind`."""
        if self.version == 2:
            # The root of the hierarchy or a delegated group gave it to the parent (`_weigh_sandboxes`).
            _enable_controllers(self.parents[MEMORY], CPU)
            self.cpu = self.parents[MEMORY]

    def _account_sandboxes(self, groups: dict[str, Path]) -> None:
        if self.version == 2:
            _enable_controllers(groups[MEMORY], _DISKS)
            _enable_controllers(self.parents[MEMORY], _DISKS)
            return
        # Mostly one hierarchy with that of the CPU, and then one group.
        self.accounts = self._place_in(_ACCOUNTS)

    def _find_freezer(self) -> None:
        """Find the place of the groups that are frozen: always of version 2, which ends frozen processes too."""
        # Version 1 does not: pid 1 could not end before somebody thaws its children. Most machines with version 1 have
        # a hierarchy of version 2 beside it, whose groups can be frozen without any controller.
        self.freezer = self.parents[MEMORY] if self.version == 2 else self._place_in("")

    def _place_in(self, controller: str) -> Path:
        """Make this instance's group in a hierarchy. Raises KeyError without the hierarchy."""
        group = _own_groups()[controller]
        _make_writable({controller: group})
        (group / self.name).mkdir(exist_ok=True)
        return group / self.name

    @property
    def folders(self) -> set[Path]:
        """The groups in which each sandbox has a group for all of its processes, pid 1 included."""
        return {*self.parents.values(), *(group for group in (self.cpu, self.accounts) if group is not None)}

    @property
    def made(self) -> set[Path]:
        """All groups of this instance, with which it ends."""
        return self.folders | ({self.freezer} if self.freezer is not None else set())

    def put_behind(self, pid: int) -> None:
        """Give a process, and all that it forks from now on, the small CPU weight."""
        if self.behind is not None:
            # It may have died.
            with contextlib.suppress(OSError):
                (self.behind / "cgroup.procs").write_text(str(pid))

    @property
    def writable(self) -> bool:
        """Whether sandboxes have groups."""
        return bool(self.parents)

    def create(self, sandbox: str) -> list[str]:
        """Make the groups of a sandbox; return the files to which its pid 1 writes its own pid."""
        groups = self._groups_of(sandbox)
        for group in groups:
            group.mkdir(exist_ok=True)
        return sorted(str(group / "cgroup.procs") for group in groups)

    def limit(self, sandbox: str, *, memory_bytes: int, pids: int, cpus: float | None) -> None:
        """Set what the processes of a sandbox may use together: CPUs in seconds of a second, None for all."""
        if cpus is not None and self.cpu is not None:
            quota_us = max(_LEAST_QUOTA_US, int(cpus * _PERIOD_US))
            name, text = (
                ("cpu.cfs_quota_us", f"{quota_us}") if self.version == 1 else ("cpu.max", f"{quota_us} {_PERIOD_US}")
            )
            with contextlib.suppress(FileNotFoundError):
                (self.cpu / sandbox / name).write_text(text)
        for controller, parent in self.parents.items():
            limits = {"pids.max": pids + _OWN_PIDS} if controller == PIDS else self._memory_limits(memory_bytes)
            for name, value in limits.items():
                # A kernel without swap accounting lacks the file of the swap limit.
                with contextlib.suppress(FileNotFoundError):
                    (parent / sandbox / name).write_text(str(value))

    def _memory_limits(self, limit: int) -> dict[str, int]:
        if self.version == 1:
            # Memory of TCP and UDP sockets, in spite of the name; it is no part of the other two.
            sockets = {"memory.kmem.tcp.limit_in_bytes": limit}
            return {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit, **sockets}
        # The kernel kills one process, as on version 1, and not the whole group.
        return {"memory.max": limit, "memory.swap.max": 0, "memory.oom.group": 0}

    def freeze(self, sandbox: str, pid_one: int, only: Collection[int] | None = None) -> None:
        """Stop all processes of a sandbox but its pid 1, or `only` some; return once they stand still. Blocking."""
        group = self._frozen_group(sandbox)
        group.mkdir(exist_ok=True)
        # Those that a restore has made are not in there yet. A process that forks meanwhile leaves its child outside.
        for _ in range(_MOVES):
            pids = {int(pid) for pid in (self.parents[PIDS] / sandbox / "cgroup.procs").read_text().split()} - {pid_one}
            pids = pids if only is None else {pid for pid in pids if _number_in_sandbox(pid) in only}
            inside = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
            if not pids - inside:
                break
            for pid in pids - inside:
                # It may have ended.
                with contextlib.suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(str(pid))
        (group / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + _STILL_S
        while "frozen 1" not in (group / "cgroup.events").read_text():
            if time.monotonic() > deadline:
                raise OSError(f"the processes of {group} do not stand still")
            time.sleep(_STILL_POLL_S)

    def thaw(self, sandbox: str) -> None:
        """Let the processes of a sandbox run again."""
        with contextlib.suppress(FileNotFoundError):
            (self._frozen_group(sandbox) / "cgroup.freeze").write_text("0")

    def open_freezer(self, sandbox: str) -> int:
        """Open the file that stops the processes which are frozen when 1 is written to it, and lets them run with 0."""
        return os.open(self._frozen_group(sandbox) / "cgroup.freeze", os.O_WRONLY | os.O_CLOEXEC)

    def _frozen_group(self, sandbox: str) -> Path:
        if self.freezer is None:
            raise OSError("no control groups of version 2 can be written here")
        return self.freezer / sandbox / _FROZEN if self.version == 2 else self.freezer / sandbox

    def remove(self, sandbox: str) -> bool:
        """Remove the groups of a sandbox; return False while some of its processes are still ending."""
        if self.freezer is not None and not _remove(self._frozen_group(sandbox)):
            return False
        removed = [_remove(group) for group in self._groups_of(sandbox)]
        return all(removed)

    def _groups_of(self, sandbox: str) -> set[Path]:
        return {parent / sandbox for parent in self.folders}

    def close(self) -> None:
        """Kill all processes in this instance's groups, and remove the groups."""
        for parent in self.made:
            sweep(parent)
        self.parents, self.behind, self.cpu, self.accounts, self.freezer = {}, None, None, None, None


def _number_in_sandbox(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("NSpid:")).split()[-1])
    return 0


def sweep(parent: Path) -> None:
    """Kill every process in the groups below a group, then remove the groups. Takes at most `_SWEEP_S`."""
    deadline = time.monotonic() + _SWEEP_S
    # Another process may remove it meanwhile.
    while parent.is_dir() and time.monotonic() < deadline:
        groups = [group for group in parent.glob("*") if group.is_dir()]
        for group in groups:
            for below in (group / _FROZEN, group):
                _kill_all(below)
                _remove(below)
        if not groups and _remove(parent):
            return
        # A group cannot be removed before its last process was reaped.
        time.sleep(_POLL_S)


def _kill_all(group: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _is_ours(group: Path) -> bool:
    if group == mount_points()[""]:
        # The root of a container. The root of the machine's hierarchy has no type, and needs no move.
        return (group / "cgroup.type").exists()
    return any(_attribute(group, name) == b"1" for name in _DELEGATED)


def _attribute(group: Path, name: str) -> bytes:
    try:
        return os.getxattr(group, name)
    except OSError:
        return b""


def _move_processes(group: Path, below: Path) -> None:
    below.mkdir(exist_ok=True)
    for _ in range(_MOVES):
        pids = (group / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            # It may have ended.
            with contextlib.suppress(ProcessLookupError):
                (below / "cgroup.procs").write_text(pid)


def _enable_controllers(group: Path, *controllers: str) -> None:
    names = controllers or (MEMORY, PIDS)
    (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))


def _find_hierarchy() -> tuple[int, list[dict[str, Path]]] | None:
    """Return the version and the groups to try, each by controller; None if no hierarchy has both controllers."""
    own = _own_groups()
    if MEMORY in own and PIDS in own:
        return 1, [{name: own[name] for name in (MEMORY, PIDS)}]
    if "" not in own:
        return None
    # Below a delegated group, an earlier look has moved this process.
    around = own[""].parent if own[""].name == PROXY_GROUP else own[""]
    groups = [around, mount_points()[""]]
    able = [group for group in groups if {MEMORY, PIDS} <= set((group / "cgroup.controllers").read_text().split())]
    return (2, [{MEMORY: group, PIDS: group} for group in able]) if able else None


def make_writable() -> None:
    """Make this process's control groups writable for what it executes without the right to it, as far as it may."""
    with contextlib.suppress(OSError):
        own = _own_groups()
        _, candidates = _find_hierarchy() or (0, [])
        for groups in [*candidates, {name: own[name] for name in (CPU, _ACCOUNTS) if name in own}]:
            _make_writable(groups)


def _make_writable(groups: dict[str, Path]) -> None:
    """Make the mounts of groups writable in this process's mount namespace, if they are read-only and it may."""
    # A container runtime mounts its own groups read-only. CAP_SYS_ADMIN is needed for this, as for sandboxes.
    for group in groups.values():
        if os.statvfs(group).f_flag & os.ST_RDONLY:
            mount = next(path for path in (group, *group.parents) if path.is_mount())
            # A remount sets all flags anew; these are those of container runtimes and of systemd.
            flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
            kernel.mount("", str(mount), "", kernel.MS_REMOUNT | kernel.MS_BIND | flags)


class Bounded(NamedTuple):
    """A limit of a group that this process is in, and how much of it is used and cannot be taken back."""

    limit: int
    used: int


def own_bounds(controller: str) -> list[Bounded]:
    """Return the limits of memory in bytes, or of processes, of this process's group and of those above."""
    bounds = []
    for group in _own_and_above(controller):
        # The root of a hierarchy has no such files, and a group with a limit has all of them.
        with contextlib.suppress(OSError, ValueError, KeyError):
            bounds += [_memory_of(group)] if controller == MEMORY else [_bound(group, "pids.max", "pids.current")]
    return bounds


@cache
def _own_and_above(controller: str) -> list[Path]:
    own, mounts = _own_groups(), mount_points()
    name = controller if controller in own else ""
    if name not in own:
        return []
    return [group for group in (own[name], *own[name].parents) if group.is_relative_to(mounts[name])]


def _memory_of(group: Path) -> Bounded:
    old = (group / "memory.limit_in_bytes").exists()
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    found = _bound(group, *names)
    parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Pages of files are given up before the limit is reached; in version 1, those of the groups below are in `total_`.
    files = sum(int(parts[f"{'total_' if old else ''}{part}_file"]) for part in ("inactive", "active"))
    return Bounded(found.limit, max(0, found.used - files))


def _bound(group: Path, limit: str, used: str) -> Bounded:
    text = (group / limit).read_text().strip()
    return Bounded(UNLIMITED if text == "max" else int(text), int((group / used).read_text()))


def _own_groups() -> dict[str, Path]:
    """Return this process's group by controller; the empty name stands for the version 2 hierarchy."""
    groups, mounts = {}, mount_points()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                group = mounts[controller] / path.lstrip("/")
                # Without a cgroup namespace, a container sees its path as the host does, and that path is not in its
                # mount.
                groups[controller] = group if group.is_dir() else mounts[controller]
    return groups


def mount_points() -> dict[str, Path]:
    """Return the first mount point of each controller; the empty name stands for the version 2 hierarchy."""
    return {name: mount for names, mount in reversed(hierarchies()) for name in names}


def hierarchies() -> list[tuple[list[str], Path]]:
    """Return the mounts of all hierarchies: the controllers, or an empty name for version 2, and the mount point."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in {"cgroup", "cgroup2"}:
            found.append((options.split(",") if kind == "cgroup" else [""], Path(before.split()[4])))
    return found
