"""The checkpointer: what a driver needs to save and restore images of live processes (`snapshots.criu.checkpoints`)."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

MappedFiles = dict[str, str]
"""The checkpointer's names of mapped files that it cannot open by itself, with their paths in the sandbox."""

ProgramStarter = Callable[[list[str], list[int]], Awaitable[Any]]
"""Starts the checkpoint program inside a sandbox. Its arguments are the program's own, and descriptors: the
`guest.checkpoints.criu_launch.CriuFiles`, and for a restore `ns_last_pid` before them. The caller keeps the descriptors
and closes them."""

WITHOUT_CHECKPOINTS = (
    "Without CRIU, states with live processes (a server, a REPL) are reached by replaying their calls. In tasks with "
    "servers a branch then took 1.6 to 1.8 s at the median, and 0.2 to 0.5 s with CRIU."
)
"""What missing checkpoints cost, as measured."""

FreezeHook = Callable[[MappedFiles], Awaitable[None]]
"""Runs while the processes of a sandbox are frozen, so that the driver can copy the files of the same moment."""


class StandStill(NamedTuple):
    """What a restore does for processes that stand still until their first call."""

    # Freezes them when all are restored and none has run. It returns the descriptor of the file that thaws them with 0
    # and freezes them with 1; the checkpointer closes it.
    freeze: Callable[[], Awaitable[int]]
    pids: list[int]  # All processes of the checkpoint, as the sandbox numbers them.
    locks: list[list[int]]  # The record locks that are set again then; see `guest.checkpoints.mapped_locks`.


class Checkpointer(Protocol):
    """Saves and restores images of live processes for one driver. Each image set has a name of its own."""

    @property
    def unavailable_reason(self) -> str:
        """Why checkpoints do not work here; empty while they do, and until `is_available` was first called."""
        ...

    async def is_available(self) -> bool:
        """Return whether checkpoints work on this machine. The first call finds out."""
        ...

    def names(self) -> set[str]:
        """Return the names of the complete checkpoints on disk. Blocking, one directory listing."""
        ...

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes that the checkpoints among `names` occupy on disk. Blocking."""
        ...

    def added_bytes(self, name: str) -> int:
        """Return the bytes on disk that a checkpoint takes beyond what it shares with earlier ones. Blocking."""
        ...

    def drop(self, names: Iterable[str]) -> None:
        """Delete the checkpoints among `names`; other names are ignored. Blocking."""
        ...

    async def dump(self, start: ProgramStarter, root_pid: int, on_frozen: FreezeHook, base: str | None = None) -> str:
        """Save a process tree, whose processes then run on; return the new checkpoint's name.

        `root_pid` is the tree's root, as a pid of the sandbox's namespace. `base` is the checkpoint that the processes
        come from, or of which they are a later state: what it has need not be kept twice. None, or one that is gone,
        stands for no base. Raises NotFreezableError, with the program's reason, if the processes cannot be saved, and
        SandboxError if the machine failed.
        """
        ...

    async def restore(
        self, name: str, start: ProgramStarter, inherited: Sequence[str], stillness: StandStill | None = None
    ) -> None:
        """Restore a checkpoint in a sandbox in which no process of the agent runs yet.

        `inherited` names the descriptors that `start` passes from `INHERITED_FD` on, in that order. `stillness` keeps
        the processes from running; None lets them run at once. Raises SandboxError if the machine, the program or the
        sandbox failed.
        """
        ...


class NoCheckpointer:
    """A checkpointer that saves nothing: states with live processes are then reached by replay."""

    unavailable_reason = "checkpoints of live processes are turned off"

    async def is_available(self) -> bool:
        """Return False."""
        return False

    def names(self) -> set[str]:
        """Return no names."""
        return set()

    def size_bytes(self, names: Iterable[str]) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def added_bytes(self, name: str) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def drop(self, names: Iterable[str]) -> None:
        """Do nothing: there are no checkpoints."""

    async def dump(self, start: ProgramStarter, root_pid: int, on_frozen: FreezeHook, base: str | None = None) -> str:
        """Fail: drivers call this only where `is_available` returned True."""
        raise NotImplementedError

    async def restore(
        self, name: str, start: ProgramStarter, inherited: Sequence[str], stillness: StandStill | None = None
    ) -> None:
        """Fail: no checkpoint has a name here."""
        raise NotImplementedError
