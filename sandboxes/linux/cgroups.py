"""Limits for a sandbox's processes together: control groups of version 2 or 1, where we may write them."""

import contextlib
import os
import signal
import time
from pathlib import Path

MEMORY, PIDS = "memory", "pids"


class Cgroups:
    """One group per sandbox below one of this instance. Without writable groups every method does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.parents: dict[str, Path] = {}
        self.problem = ""

    def open(self) -> None:
        """Make this instance's group; `problem` says why there is none."""
        try:
            found = _find()
        except OSError as error:
            self.problem = str(error)
            return
        if found is None:
            self.problem = "neither a version 2 nor a version 1 hierarchy with memory and pids is mounted"
            return
        self.version, places = found
        for place in places:
            try:
                self.parents = self._make_at(place)
            except OSError as error:
                self.problem = f"{error.filename}: {error.strerror}"
                self.close()
            else:
                self.problem = ""
                return

    def _make_at(self, place: dict[str, Path]) -> dict[str, Path]:
        for kind, root in place.items():
            parent = root / self.name
            parent.mkdir(exist_ok=True)
            self.parents[kind] = parent
            if self.version == 2:
                _enable(root)
                _enable(parent)
                return {MEMORY: parent, PIDS: parent}
        return self.parents

    @property
    def writable(self) -> bool:
        return bool(self.parents)

    def create(self, sandbox: str) -> list[str]:
        """Make a sandbox's groups; return the files into which its pid 1 writes itself. 0.1 ms."""
        groups = {parent / sandbox for parent in self.parents.values()}
        for group in groups:
            group.mkdir(exist_ok=True)
        return sorted(str(group / "cgroup.procs") for group in groups)

    def limit(self, sandbox: str, *, memory_bytes: int, pids: int) -> None:
        """Set what a sandbox's processes may use together. 0.1 ms."""
        for kind, parent in self.parents.items():
            # One more than agents may have: pid 1 lives there too.
            limits = {"pids.max": pids + 1} if kind == PIDS else self._memory_limits(memory_bytes)
            for name, value in limits.items():
                with contextlib.suppress(FileNotFoundError):
                    (parent / sandbox / name).write_text(str(value))

    def _memory_limits(self, limit: int) -> dict[str, int]:
        if self.version == 1:
            return {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        return {"memory.max": limit, "memory.swap.max": 0, "memory.oom.group": 0}

    def remove(self, sandbox: str) -> bool:
        """Remove a sandbox's groups; False while processes of it are still ending."""
        return all(list(map(_rmdir, {parent / sandbox for parent in self.parents.values()})))

    def close(self) -> None:
        """Kill what is left in this instance's groups, and remove them."""
        for parent in set(self.parents.values()):
            sweep(parent)
        self.parents = {}


def sweep(parent: Path) -> None:
    """Kill every process in the groups below parent and remove them and it. At most 5 s."""
    if not parent.is_dir():
        return
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        groups = [group for group in parent.iterdir() if group.is_dir()]
        for group in groups:
            _kill_all(group)
            _rmdir(group)
        if not groups and _rmdir(parent):
            return
        time.sleep(0.005)


def _kill_all(group: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _rmdir(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _enable(group: Path) -> None:
    (group / "cgroup.subtree_control").write_text(f"+{MEMORY} +{PIDS}")


def _find() -> tuple[int, list[dict[str, Path]]] | None:
    """Return the version and the places to try, each with the group that a controller's groups are made in.

    Version 2 hands controllers on only from groups without processes of their own. The one that this process is in has
    at least this one, unless it is the hierarchy's root, which is exempt; so that is tried next.
    """
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        for kind in kinds.split(","):
            own[kind] = path
    mounts = _mounts()
    version_1 = {kind: mounts[kind] for kind in (MEMORY, PIDS) if kind in mounts and kind in own}
    if len(version_1) == 2:
        return 1, [{kind: _below(root, own[kind]) for kind, root in version_1.items()}]
    if "" not in mounts or "" not in own:
        return None
    groups = [_below(mounts[""], own[""]), mounts[""]]
    able = [group for group in groups if {MEMORY, PIDS} <= set((group / "cgroup.controllers").read_text().split())]
    return (2, [{MEMORY: group, PIDS: group} for group in able]) if able else None


def _below(mount: Path, path: str) -> Path:
    inner = mount / path.lstrip("/")
    # In a container the path may be told from the host's point of view.
    return inner if inner.is_dir() else mount


def _mounts() -> dict[str, Path]:
    """Return controller -> mount point; "" is the version 2 hierarchy."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        place = Path(before.split()[4])
        if kind == "cgroup2":
            found.setdefault("", place)
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, place)
    return found
