"""The gate of this member: the rules of `protocol`, applied to the calls and records of its engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Container
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from proxy.cluster.edits import ClusterEdits, note, tree_lines
from proxy.cluster.lines import Deleted
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.protocol import Ended, Position, StepId, Stepped
from proxy.execution.gate import KeptElsewhere
from proxy.refusals import RefusalError
from proxy.storage.copies import CopyStore, FindingCopy, NoteCopy, RolloutCopy, copy_of
from proxy.storage.records import RecordBytes
from proxy.storage.trees import TreeStore
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record, Tree


@dataclass(slots=True, eq=False)
class Origin:
    """One call at the owner of its task, for which a piece of code works."""

    ingress: int  # Number of the ingress that the call came through.
    boot: int
    number: int
    oldest: int  # Number of the oldest call that the ingress still waits for.
    is_again: bool  # Whether the agent itself makes it again, after it was told to.
    # Returns whether the way that the call came by is still the latest one of its ingress.
    is_current: Callable[[], bool]
    confirm: Callable[[], Awaitable[bool]]  # Returns whether an agent still waits for the call at its ingress.
    steps: int = 0  # How many steps it has taken.
    # Whether the call was answered, or its stream has ended. What goes on in the background is no late copy.
    is_over: bool = False

    @property
    def call(self) -> StepId:
        """Its next step."""
        return StepId(self.ingress, self.boot, self.number, self.steps)


ORIGIN: ContextVar[Origin | None] = ContextVar("forkpoint_cluster_origin", default=None)
"""The call that the current task works for. None: this member calls for itself."""


class ClusterGate:
    """Implements `proxy.execution.gate.Gate`. Only the event loop's thread may use it."""

    _copies: CopyStore  # The parts of the store, which is created after the gate.
    _trees: TreeStore
    back_up: Callable[[Path], Awaitable[None]]  # Writes a store with all tasks of the cluster to a new file.

    def __init__(self, number: int, states: KeptElsewhere) -> None:
        self.number, self.states = number, states
        self.owned: dict[str, Owned] = {}  # The tasks that this member owns, by name.
        self.edits = ClusterEdits(self.owned, self.owned_tree)  # Writes what people change of them.
        self._tasks_of: dict[int, str] = {}

    def attach(self, copies: CopyStore, trees: TreeStore, back_up: Callable[[Path], Awaitable[None]]) -> None:
        """Take the parts of the store, and what writes backups."""
        self._copies, self._trees, self.back_up, self.edits.copies = copies, trees, back_up, copies

    # -- what the engine calls, see `Gate` ---------------------------------------------------------------------------

    def require(self, task: str) -> None:
        """Check that this member owns a task. Raises DroppedError: it does not."""
        if task not in self.owned:
            raise DroppedError(task)

    async def admit(self, rollout: Rollout) -> Record | None:
        """Wait until a call may be answered; return the record that has answered it already, if it was made before."""
        owned, origin = self._owner_of(rollout), ORIGIN.get()
        await owned.opened()
        confirmed: int | None = None
        while True:
            # After each wait: the task may have been dropped meanwhile.
            if owned.is_dropped or rollout.finished:
                raise DroppedError(rollout.task)
            if origin is None:
                return None
            answered = owned.steps.answered(rollout.id, origin.call, is_again=origin.is_again)
            if answered is not None:
                origin.steps += 1
                return _record(rollout.tree, answered)
            if not origin.is_over and not origin.is_current():
                raise RefusalError(
                    503, "stale-call", "younger calls have come since through the same member. Try again."
                )
            if not owned.steps.must_confirm(rollout.id, origin.ingress, rollout.calls, confirmed):
                return None
            confirmed = await _confirm(rollout, origin)

    async def logged(self, rollout: Rollout, record: Record, outcome: Outcome) -> None:
        """Write a step to the log. The caller takes it without another await. Raises DroppedError."""
        owned, origin = self._owner_of(rollout), ORIGIN.get()
        call, oldest = (StepId(self.number, 0, 0, 0), 0) if origin is None else (origin.call, origin.oldest)
        step = step_of(rollout, record, call, oldest, outcome)
        await asyncio.shield(owned.write([step]))
        owned.require()
        self.took(owned, rollout, record, step)
        if origin is not None:
            origin.steps += 1

    def took(self, owned: Owned, rollout: Rollout, record: Record, step: Stepped) -> None:
        """Note that a step is in the log."""
        owned.steps.take(step)
        if record.target.snapshot is not None and record.target.id not in owned.kept:
            self.states.stepped(rollout.tree, record.target)

    async def repeat(self, rollout: Rollout, record: Record) -> bool:
        """Return whether the answer of an earlier call may be given once more. Raises RefusalError."""
        await self.admit(rollout)
        return not record.source.detached

    def stored(self, tree: Tree) -> Container[int]:
        """Return the numbers of the nodes of a tree whose states the store has."""
        owned = self.owned_tree(tree.id)
        return () if owned is None else owned.kept

    def task_put(self, task: str) -> None:
        """Write a task to the log."""
        copy = self._copies.task(task)
        if copy is not None:
            note(self.owned.get(task), [copy])

    def deleted(self, task: str) -> None:
        """Write to the log that a task was deleted."""
        if task in self.owned:
            self.owned[task].forget()
            self.owned[task].note([Deleted()])

    def began(self, rollout: Rollout) -> None:
        """Write a rollout with its labels to the log, and its tree if that is not there."""
        self._tasks_of[rollout.tree.id] = rollout.task
        copy = self._copies.rollout(rollout.id)
        owned = self.owned.get(rollout.task)
        if isinstance(copy, RolloutCopy) and owned is not None:
            owned.note([*tree_lines(self._copies, owned, rollout.tree), copy])

    def ended(self, task: str, rollout: int) -> None:
        """Write to the log that a rollout has ended."""
        if task in self.owned:
            self.owned[task].steps.take(Ended(rollout))
            self.owned[task].note([Ended(rollout)])

    def noted(self, rollout: Rollout, protocol: str, value: str) -> None:
        """Write to the log what a protocol remembers of a rollout."""
        note(self.owned.get(rollout.task), [NoteCopy(rollout.id, protocol, value)])

    def differs(self, tree: Tree, record: Record, *, quarantined: bool) -> None:
        """Write to the log that a record differs, so that a later owner does not answer what this one withholds."""
        copy = FindingCopy(record.id, tree.id, record.differs, quarantined, record.reproducible, time.time())
        note(self.owned_tree(tree.id), [copy])

    def recorded(self, tree: Tree, record: Record, written: RecordBytes, *, is_first: bool) -> None:
        """Let the log have a record, at the latest with the first step by it."""
        owned = self.owned_tree(tree.id)
        if owned is None:
            raise DroppedError(self._tasks_of[tree.id])
        try:
            copy = copy_of(tree.id, record, written, is_first=is_first)
            owned.put([*tree_lines(self._copies, owned, tree), copy])
        except BaseException:
            # The tree has a record that the log lacks, so nothing of it may be answered any more.
            owned.fail("a record could not be written to the log")
            raise

    def owned_tree(self, tree: int) -> Owned | None:
        """Return the task of a tree if this member owns it."""
        task = self._tasks_of.get(tree) or self._tasks_of.setdefault(tree, self._trees.task_of(tree))
        return self.owned.get(task)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _owner_of(self, rollout: Rollout) -> Owned:
        owned = self.owned.get(rollout.task)
        if owned is None or rollout.finished:
            raise DroppedError(rollout.task)
        return owned


def step_of(rollout: Rollout, record: Record, call: StepId, oldest: int, outcome: Outcome) -> Stepped:
    """Return the next step of a rollout as a line of the log."""
    return Stepped(rollout.id, Position(rollout.calls + 1, record.target.id), record.id, call, oldest, outcome)


async def _confirm(rollout: Rollout, origin: Origin) -> int:
    """Ask the ingress of a call whether an agent waits for it; return the turn of the question. Raises RefusalError."""
    turn = rollout.calls
    if not await origin.confirm():
        raise RefusalError(
            503,
            "other-member",
            f"the calls of rollout {rollout.name!r} come through another member, and this one may be a late copy. "
            "Try again.",
        )
    return turn


def _record(tree: Tree, number: int) -> Record:
    """Return a record by its number. O(size of the tree): a call is made again when a link breaks or an owner dies."""
    for node in tree.nodes.values():
        for record in node.records.values():
            if record.id == number:
                return record
    for record in tree.aside:
        if record.id == number:
            return record
    raise RefusalError(
        409, "answer-lost", "the call took its step before a member of the cluster died, and its answer was forgotten "
        "since. Look at the rollout's steps.",
    )  # fmt: skip
