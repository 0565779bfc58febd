"""What outlives a call, and so is part of the sandbox's state."""

# Theory of operation.
#
# Seven kinds of things survive: processes, descriptors that an idle shell holds open, jobs that a shell knows of,
# sessions that no other shell can take on, IPC objects, output of background processes that was not polled yet, and
# what a command has changed of pid 1 (`renice -p 1`), which takes rights to undo. While any of them exists, the files
# alone do not describe the state, so it has a witness in place of a digest, and only a checkpoint can freeze it.
#
# Processes get some grace before they count: most of what a command starts ends a moment after the command itself. So
# does what a command ends: a process that it has killed needs a CPU to die, and one that catches the signal runs first.

import mmap
import os
import time
from collections.abc import Callable, Collection
from typing import Any

from sandboxes.guest.background import BackgroundProcesses
from sandboxes.guest.bash.session import KEPT, MOVED
from sandboxes.guest.shell import Shell
from sandboxes.guest.shells import Shells
from sandboxes.linux import processes
from sandboxes.linux.live_state import inherited, settings
from sandboxes.linux.processes import Process

_KINDS = {
    "background": "a background process has not been polled to its end",
    "descriptors": "the shell holds open descriptors",
    "founder": "a command has changed the limits, scheduling or terminals of pid 1",
    "ipc": "System V semaphores or message queues, or POSIX message queues exist",
    "jobs": "the shell knows of jobs that a later call may wait for",
    "segments": "System V shared memory exists",
    "scheduling": "the shell has another niceness, CPUs or OOM score than it was born with",
    "session": "a session goes on in its own shell, because no fresh one can take it on",
}

OUTSIDE_IPC = f"{_KINDS['ipc']}, and a checkpoint does not hold them"
_PERMISSIONS = 0o777
_MOST_SEGMENTS = 20
"""The most segments that one look at `/proc/sysvipc/shm` shows (`processes.shown`)."""


class Survivors:
    """What outlives the calls of one sandbox; true if anything does."""

    def __init__(
        self,
        shells: Shells,
        background: BackgroundProcesses,
        living: Callable[[Collection[int]], dict[Process, list[bytes]]],
    ) -> None:
        """Nothing survives yet. `living` returns all processes but the given ones, with their `stat_fields`."""
        self._shells, self._background, self._living = shells, background, living
        # Of pid 1: a call that touches the anchor has it replaced.
        self._born: list[str] = []
        self._settled = 0
        # What was there after the last call. Two equal values mean that the same things survive.
        self.now: frozenset[Any] = frozenset()
        # Whether anything else than jobs of shells survives. Jobs alone do not change the state by themselves.
        self.moving = False

    def __bool__(self) -> bool:
        return bool(self.now)

    @property
    def processes(self) -> list[Process]:
        """The agent's processes."""
        return [(entry[0], entry[1]) for entry in self.now if isinstance(entry[0], int)]

    @property
    def jobs(self) -> list[tuple[str, bytes]]:
        """What the shells know of their jobs, by session."""
        return sorted((entry[1], entry[2]) for entry in self.now if entry[0] == "jobs")

    @property
    def outside_checkpoint(self) -> str:
        """Why no checkpoint holds everything that survives; empty if one does."""
        if any(kind == "ipc" for kind, *_ in self.now):
            return OUTSIDE_IPC
        return _KINDS["founder"] if any(kind == "founder" for kind, *_ in self.now) else ""

    @property
    def description(self) -> str:
        """At most five of the things that survive, as text."""
        return "; ".join(sorted({_KINDS.get(str(kind), f"process {kind} runs") for kind, *_ in self.now})[:5])

    def begin(self) -> None:
        """Look at pid 1 before the first call."""
        self._born = self._born or settings(1)

    def settle(self, asleep: Collection[Process] = (), *, patient: bool = True) -> None:
        """Find out what survives; `asleep` slept before the call. Restored processes need no grace period to end."""
        self._settled += 1
        running = self._running(asleep) if patient else set(self._others())
        # Each call may move a descriptor's offset or write to shared memory. Neither can be compared, so the number of
        # the call is part of these entries: they never equal earlier ones.
        held = {("descriptors", shell.name, shell.runs) for shell in holding(self._shells)}
        counts = {"segments": processes.ipc_objects("shm"), "ipc": outside_ipc()}
        shared = {(kind, count, self._settled) for kind, count in counts.items() if count}
        now: set[Any] = (
            running | held | shared | self._background.state | kept(self._shells) | rescheduled(self._shells)
            | self._changed_founder()
        )  # fmt: skip
        self.moving = bool(now)
        # Beside survivors a shell is not replaced after its call, so it goes on knowing its jobs, whatever they are.
        known = {("jobs", shell.name, shell.knowledge, *shell.jobs) for shell in self._shells if shell.jobs}
        self.now = frozenset(now | {entry for entry in known if entry[2] or now})

    def _running(self, asleep: Collection[Process]) -> set[Process]:
        grace, pauses_s = processes.Grace(), iter(processes.PAUSES_S)
        pause_s = 0.0
        while True:
            others = self._others()
            unknown = others.keys() - self.now
            if unknown and any(shell.baseline is None for shell in self._shells):
                # A shell that is still starting has children of its own, which are not the agent's.
                self._shells.ready_all()
                continue
            ending = any(processes.is_ending(pid, fields) for (pid, _), fields in others.items())
            # The call has woken these, and they may be about to end.
            unknown |= {process for process in others.keys() & asleep if processes.is_busy(others[process])}
            if grace.is_over or not (ending or (unknown and not grace.expired(unknown))):
                return set(others)
            pause_s = next(pauses_s, pause_s)
            time.sleep(pause_s)

    def _changed_founder(self) -> set[tuple[str, ...]]:
        now = settings(1)
        return {("founder", *now)} if self._born and now and now != self._born else set()

    def _others(self) -> dict[Process, list[bytes]]:
        return self._living(self._shells.idle_pids)


def outside_ipc() -> int:
    """Return the number of IPC objects that no process has to hold, and that no checkpoint holds either."""
    # CRIU saves semaphores, but not what a process that ends takes back of them (`SEM_UNDO`, semop(2)).
    return processes.ipc_objects("sem", "msg") + len(os.listdir("/dev/mqueue"))  # noqa: PTH208 - no pathlib in pid 1


def unsaved_segments(pids: Collection[int]) -> str:
    """Return why CRIU would lose something of System V shared memory; empty if it would not."""
    # The processes stand still. CRIU makes a segment again with its ID, key, owner, permissions and content, and
    # attaches it as a whole.
    _, *lines = processes.shown("/proc/sysvipc/shm").splitlines()
    segments = {int(fields[1]): fields for fields in map(bytes.split, lines)}
    if len(segments) >= _MOST_SEGMENTS:
        return f"{_MOST_SEGMENTS} segments of System V shared memory or more exist"
    for segment, fields in segments.items():
        if int(fields[2], 8) & ~_PERMISSIONS:
            return f"the System V segment {segment} is locked, or was removed while processes use it"
    for pid in pids:
        with open(f"/proc/{pid}/maps", "rb") as maps:  # noqa: PTH123
            mappings = [line.split(None, 5) for line in maps if b" /SYSV" in line]
        for places, _, offset, _, number, *_ in mappings:
            begin, end = (int(place, 16) for place in places.split(b"-"))
            size = int(segments[int(number)][3]) if int(number) in segments else 0
            if int(offset, 16) or end - begin != -(-size // mmap.PAGESIZE) * mmap.PAGESIZE:
                return f"process {pid} has a part of the System V segment {int(number)} only"
    return ""


def holding(shells: Shells) -> list[Shell]:
    """Return the idle shells that hold more descriptors than when they were new."""
    holders = []
    for shell in shells:
        # A shell that is still starting has run nothing yet.
        if shell.baseline is None or not shell.holds_more():
            continue
        if shell.ended:
            # Another process has killed it. Its session is the one in its last dump.
            shells.kill(shell)
        else:
            holders.append(shell)
    return holders


def rescheduled(shells: Shells) -> set[tuple[str, ...]]:
    """Return the idle shells whose scheduling is not the first shell's, with their scheduling: no dump has it."""
    begun = (shell for shell in shells if shell.baseline is not None and not shell.waits_as_template)
    scheduling = ((shell, inherited(shell.pid)) for shell in begun)
    return {("scheduling", shell.name, *now) for shell, now in scheduling if now not in ([], shell.born)}


def kept(shells: Shells) -> frozenset[tuple[str, str]]:
    """Return the sessions that only their own shell has, as pairs of "session" and a name."""
    for shell in shells:
        if shell.baseline is None or KEPT in shell.baseline or shell.stands_at(shell.baseline["cwd"]):
            continue
        # A shell that was just killed has no directory, and a moment passes until it has ended.
        processes.wait_until_asleep(shell.pid, lambda: False)
        if shell.ended or (shell.session is None and shell.runs == 0):
            # Its session is that of its last dump. One in which nothing happened begins as if it was never there.
            shells.kill(shell)
        else:
            # A call, of this session or not, has moved its directory.
            shell.session = shells.sessions[shell.name] = {**(shell.session or shell.baseline), KEPT: MOVED}
            shell.baseline = {**shell.baseline, KEPT: MOVED}
    return frozenset(("session", shell.name) for shell in shells if shell.baseline and KEPT in shell.baseline)
