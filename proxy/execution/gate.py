"""What a member of a cluster must know before it answers, as a protocol that `proxy.cluster` implements.

Without a cluster there is no gate, and every test for one is a comparison with None.
"""

from collections.abc import Awaitable, Callable, Container, Iterable
from pathlib import Path
from typing import Protocol

from proxy.storage.records import RecordBytes
from proxy.tree.restore_plan import RestorePlan
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record, Tree


class EditLog(Protocol):
    """Writes to the log what people change of a task."""

    def changed(self, tree: Tree, nodes: Iterable[Node]) -> None:
        """Note that people have changed nodes: pinned them, or set them aside."""
        ...

    def forgot(self, tree: Tree, nodes: Iterable[Node], records: Iterable[Record]) -> None:
        """Note that nodes and records were deleted from the store."""
        ...

    def labelled(self, task: str, rollout: int) -> None:
        """Note the labels of a rollout that is not in memory, by its number."""
        ...

    def masked(self, task: str, masks: str) -> None:
        """Note the noise masks of a task's audits, as JSON."""
        ...

    async def importing(self, task: str, tree: int) -> None:
        """Write a tree to the log of its new task. Raises RefusalError (503) if this member owns it no more."""
        ...

    def imported(self, task: str, tree: Tree, replaced: int | None) -> None:
        """Note that a task has got a tree, in place of the empty one with this root, if there was one."""
        ...


class KeptElsewhere(Protocol):
    """The states and recordings of this proxy's tasks that other machines have, or shall have."""

    async def fetch(self, tree: Tree, node: Node, plan: RestorePlan | None) -> bool:
        """Fetch a snapshot that makes the way to a node cheaper than a plan, or possible; return whether one came."""
        ...

    async def fetch_recordings(self, tree: Tree) -> None:
        """Fetch what hosts outside have sent to sandboxes of a tree, before one is leased. Raises SandboxError."""
        ...

    async def send_recordings(self, tree: Tree) -> None:
        """Keep what hosts outside have sent to sandboxes of a tree, before a call is recorded. Raises SandboxError."""
        ...

    def stepped(self, tree: Tree, node: Node) -> None:
        """Note that a node has a snapshot here, or that a rollout has come to it."""
        ...


class NothingElsewhere:
    """Implements `KeptElsewhere` for a proxy that shares its tasks with no other machine."""

    async def fetch(self, tree: Tree, node: Node, plan: RestorePlan | None) -> bool:  # noqa: ARG002 - see above
        """Return False."""
        return False

    async def fetch_recordings(self, tree: Tree) -> None:
        """Do nothing."""

    async def send_recordings(self, tree: Tree) -> None:
        """Do nothing."""

    def stepped(self, tree: Tree, node: Node) -> None:
        """Do nothing."""


class Gate(Protocol):
    """Decides what this member may answer, and writes to the log what its answers depend on."""

    @property
    def edits(self) -> EditLog:
        """See the class."""
        ...

    @property
    def states(self) -> KeptElsewhere:
        """What other machines have of this member's tasks."""
        ...

    @property
    def owned(self) -> Container[str]:
        """The tasks that this member owns."""
        ...

    def require(self, task: str) -> None:
        """Raise RefusalError (503) unless this member owns a task."""
        ...

    async def admit(self, rollout: Rollout) -> Record | None:
        """Wait until a call that has its turn may be answered; return the record that has answered it already, if any.

        Raises RefusalError if the call cannot be answered here and now.
        """
        ...

    async def logged(self, rollout: Rollout, record: Record, outcome: Outcome) -> None:
        """Write a step to the log, with its record. The rollout takes the step without another await.

        Raises RefusalError (503) if this member does not own the task any more.
        """
        ...

    async def repeat(self, rollout: Rollout, record: Record) -> bool:
        """Return whether the answer of an earlier call may be given once more, for a rollout whose turn is held.

        Another member may have owned the task since, so that the step does not count. Raises RefusalError as `admit`.
        """
        ...

    def stored(self, tree: Tree) -> Container[int]:
        """Return the numbers of the nodes of a tree whose states the next owner can fetch."""
        ...

    @property
    def back_up(self) -> Callable[[Path], Awaitable[None]]:
        """Writes a store with all tasks of the cluster to a new file. Raises RefusalError (503), StoreError."""
        ...

    def task_put(self, task: str) -> None:
        """Note that a task was written to the store."""
        ...

    def deleted(self, task: str) -> None:
        """Note that a task was deleted from the store."""
        ...

    def began(self, rollout: Rollout) -> None:
        """Note that a rollout was written to the store, with its labels, or moved to another tree before a call."""
        ...

    def ended(self, task: str, rollout: int) -> None:
        """Note that a rollout has ended, by its number."""
        ...

    def noted(self, rollout: Rollout, protocol: str, value: str) -> None:
        """Note what a protocol remembers of a rollout, as JSON."""
        ...

    def differs(self, tree: Tree, record: Record, *, quarantined: bool) -> None:
        """Note that a record differs from what its call does now (`Record.differs`), as the store has it."""
        ...

    def recorded(self, tree: Tree, record: Record, written: RecordBytes, *, is_first: bool) -> None:
        """Note that a record was written to the store; `is_first` if it was the first to reach its target."""
        ...
