"""Who lives in a container, seen from outside it: by the pids of this machine, through its control group."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from sandboxes.linux.processes import Process

KILL_S = 10.0
_PF_EXITING = 0x4


class Household:
    """The processes of one container. `init`: the descriptor and pid of its pid 1."""

    def __init__(self, pid: int, container: str) -> None:
        """Find the container behind pid 1's pid.

        Raises:
            OSError: it is gone, or pid is by now another process.
        """
        self.pid = pid
        self.init = os.pidfd_open(pid)
        self._procs = _members_file(pid, container)

    def pids(self) -> list[int]:
        """Return every process of the container, zombies included."""
        try:
            # Opened each time: read again, version 1 would tell what it told before.
            with open(self._procs, "rb") as file:  # noqa: PTH123 - many times a call
                data = file.read()
        except OSError:
            # The group is gone, and so are they.
            return []
        return [int(pid) for pid in data.split()]

    def living(self) -> set[Process]:
        """Return those that live; 0.03 ms each."""
        return {(pid, started) for pid in self.pids() if (started := start_time(pid)) is not None}

    def find(self, inner: int) -> int | None:
        """Return the pid here of the process that the container calls inner."""
        for pid in self.pids():
            if inner_of(pid) == inner:
                return pid
        return None

    def kill_except(self, spared: set[int], first: int | None = None) -> None:
        """Kill all but spared pids, however fast they fork. first goes before the others."""
        if first is not None:
            kill(first)
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            doomed = {pid for pid, _ in self.living()} - spared
            if not doomed:
                return
            # Stopped first: what is stopped does not fork, so each round leaves fewer that do.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in doomed:
                    kill(pid, number)
            time.sleep(0.0005)

    def written_paths(self) -> set[str]:
        """Return the paths, relative to the root, of the files that a living process has open for writing."""
        found = set()
        for pid in self.pids():
            try:
                for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                    with open(f"/proc/{pid}/fdinfo/{name}") as file:  # noqa: PTH123
                        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                    if flags & os.O_ACCMODE != os.O_RDONLY:
                        found.add(os.readlink(f"/proc/{pid}/fd/{name}").lstrip("/"))  # noqa: PTH115
            except (OSError, StopIteration):
                # It ended meanwhile.
                continue
        return found


def inner_of(pid: int) -> int:
    """Return what a container calls the process that is pid here; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123 - many times a call
            return int(next(line for line in file if line.startswith(b"NSpid:")).split()[-1])
    except (OSError, StopIteration):
        return 0


def join(pid: int) -> None:
    """Move this process into all control groups of another: what it starts then counts and is limited as theirs."""
    places = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            places[""] = place.split()[4]
        elif kind.startswith("cgroup "):
            for option in kind.split()[2].split(","):
                places[option] = place.split()[4]
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if path == "/" or (mount := places.get(kinds.split(",")[0])) is None:
            continue
        (Path(mount) / path.lstrip("/") / "cgroup.procs").write_text("0")


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks; None for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def exiting(pid: int) -> bool:
    """Whether a process has ended or is about to. A pid 1 is, before the others of its container are killed."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True
    return bool(int(fields[6]) & _PF_EXITING)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to one that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def environment(pid: int) -> dict[str, str]:
    """Return what a process was started with, as latin-1 text."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode("latin-1").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def ids(pid: int) -> tuple[int, int, list[int]]:
    """Return the user, group and further groups of a process."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(facts["Uid"].split()[1]), int(facts["Gid"].split()[1]), [int(gid) for gid in facts["Groups"].split()]


def _members_file(pid: int, container: str) -> str:
    """Return the `cgroup.procs` of a container's group, of version 1 or 2."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    groups = {kind: path for _, kind, path in lines if container in path}
    for mount, kinds in _hierarchies():
        for kind in kinds:
            if kind in groups and Path(found := f"{mount}{groups[kind]}/cgroup.procs").exists():
                return found
    raise ProcessLookupError(
        3, f"process {pid} is not of container {container[:12]}, or this machine's control groups are not visible here"
    )


def _hierarchies() -> Iterable[tuple[str, list[str]]]:
    """Yield where control groups are mounted, and which: `pids` first, for every container has its own there."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            found.append((place.split()[4], [""]))
        elif kind.startswith("cgroup "):
            options = kind.split()[2].split(",")
            if "pids" in options or "memory" in options:
                found.append((place.split()[4], [",".join(sorted(options)), *options]))
    return sorted(found, key=lambda entry: "pids" not in entry[1])
