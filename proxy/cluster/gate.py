"""The gate of this member: the rules of `protocol`, applied to the calls and records of its engine."""

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from proxy.cluster.lines import Kept, Line
from proxy.cluster.origin import ORIGIN
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.positions import PositionFile
from proxy.cluster.protocol import Admission, Ended, Entered, Position
from proxy.refusals import RefusalError
from proxy.storage.copies import CopyStore, FindingCopy, NoteCopy, copy_of
from proxy.storage.records import RecordBytes
from proxy.storage.trees import TreeStore
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record, Tree

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

HOLD_S = 10.0
"""How long a call waits for the ingress that knows its rollout's position, in seconds, before it gets 503."""


class StaleCallError(RefusalError):
    """The link that brought this call has ended: its ingress sends the call again if an agent still waits for it."""

    def __init__(self) -> None:
        super().__init__(503, "stale-call", "the link that brought this call has ended. Try again.")


class ClusterGate:
    """Implements `proxy.execution.gate.Gate`. Only the event loop's thread may use it.

    Attributes:
        owned: The tasks that this member owns, by name.
        number: Number of this member.
        positions: What this member, as an ingress, has passed on.
        name_of: Returns the name of a member by its number, for error texts.
    """

    def __init__(self, number: int, positions: PositionFile) -> None:
        self.number, self.positions = number, positions
        self.owned: dict[str, Owned] = {}
        self.name_of: Callable[[int], str] = str
        self._tasks_of: dict[int, str] = {}
        self._copies: CopyStore | None = None
        self._trees: TreeStore | None = None

    def attach(self, copies: CopyStore, trees: TreeStore) -> None:
        """Take the parts of the store, which is created after the gate."""
        self._copies, self._trees = copies, trees

    # -- what the engine calls, see `Gate` ---------------------------------------------------------------------------

    def require(self, task: str) -> None:
        """Check that this member owns a task.

        Raises:
            DroppedError: It does not.
        """
        if task not in self.owned:
            raise DroppedError(task)

    def may_hit(self, rollout: Rollout, record: Record) -> bool:
        """Return whether a record may be answered to a rollout now. 0.5 us."""
        owned = self.owned.get(rollout.task)
        if owned is None or not owned.is_ready or record.id in owned.unlogged:
            return False
        line = owned.rules.entered.get(rollout.id)
        if line is None or line.ingress in owned.rules.unheard:
            return False
        origin = ORIGIN.get()
        if origin is None:
            return line.ingress == self.number
        if origin.in_log and origin.ingress != self.number:
            # The log must have the step first.
            return False
        return line.ingress == origin.ingress and origin.is_current()

    async def admit(self, rollout: Rollout) -> None:
        """Wait until a rollout's position is sure and the log names the ingress of this call.

        Raises:
            RefusalError: The call cannot be answered here and now.
        """
        owned, origin = self._owner_of(rollout), ORIGIN.get()
        ingress = self.number if origin is None else origin.ingress
        until = asyncio.get_running_loop().time() + HOLD_S
        while not owned.is_ready and await owned.await_change(until):
            pass
        confirmed: int | None = None
        while True:
            # After each wait: the task may have been dropped meanwhile.
            if not owned.is_ready or owned.is_dropped or rollout.finished:
                raise DroppedError(rollout.task)
            match owned.rules.admit(rollout.id, ingress, rollout.calls, confirmed):
                case Admission.HOLD:
                    await self._await_report(owned, rollout, until)
                case Admission.CONFIRM:
                    confirmed = await self._confirm(rollout)
                case Admission.ENTER:
                    self._require_current()
                    await self._enter(owned, rollout, ingress, Position(rollout.calls, rollout.node.id))
                    return
                case Admission.SERVE:
                    self._require_current()
                    if owned.rules.entered[rollout.id].position.turn > rollout.calls:
                        # A step that is in the log (`logged`) was not taken, because its answer could not be read.
                        await self._enter(owned, rollout, ingress, Position(rollout.calls, rollout.node.id))
                    return

    async def logged(self, rollout: Rollout, record: Record) -> None:
        """Wait until a record is in the log, and the step to it if no answer carries the position to the ingress.

        Raises:
            DroppedError: This member does not own the task any more.
        """
        owned, origin = self._owner_of(rollout), ORIGIN.get()
        written = owned.unlogged.get(record.id)
        if written is not None:
            # Several calls may wait for it, and each of them may be cancelled.
            await asyncio.shield(written)
        owned.require()
        if origin is not None and origin.in_log and origin.ingress != self.number:
            # The caller takes the step without another await.
            await self._enter(owned, rollout, origin.ingress, Position(rollout.calls + 1, record.target.id))

    def step(self, rollout: Rollout, record: Record) -> None:
        """Note where a rollout will be, for the ingress of the call."""
        self._keep(rollout, Position(rollout.calls + 1, record.target.id))

    async def repeat(self, rollout: Rollout, record: Record) -> bool:
        """Return whether the answer of an earlier call may be given once more, and note where the rollout is.

        Raises:
            RefusalError: The call cannot be answered here and now.
        """
        await self.admit(rollout)
        if record.source.detached:
            return False
        if rollout.node is record.target:
            # The retry may have come through another ingress than the call.
            self._keep(rollout, Position(rollout.calls, rollout.node.id))
        return True

    def task_put(self, task: str) -> None:
        """Write a task to the log."""
        assert self._copies is not None
        copy = self._copies.task(task)
        if copy is not None:
            self._write(task, [copy])

    def began(self, rollout: Rollout) -> None:
        """Write a rollout to the log, with its tree if that is not there."""
        assert self._copies is not None
        self._tasks_of[rollout.tree.id] = rollout.task
        copy = self._copies.rollout(rollout.id)
        owned = self.owned.get(rollout.task)
        if copy is not None and owned is not None:
            self._write(rollout.task, [*self._tree_lines(owned, rollout.tree), copy])

    def ended(self, task: str, rollout: int) -> None:
        """Write to the log that a rollout has ended."""
        owned, origin = self.owned.get(task), ORIGIN.get()
        if owned is None:
            return
        owned.rules.end(rollout)
        self._write(task, [Ended(rollout)])
        if origin is not None and origin.ingress != self.number:
            origin.positions[rollout] = None

    def noted(self, rollout: Rollout, protocol: str, value: str) -> None:
        """Write to the log what a protocol remembers of a rollout."""
        owned = self.owned.get(rollout.task)
        if owned is not None:
            owned.note([NoteCopy(rollout.id, protocol, value)])

    def differs(self, tree: Tree, record: Record, *, quarantined: bool) -> None:
        """Write to the log that a record differs, so that a later owner does not answer what this one withholds."""
        owned = self.owned_tree(tree.id)
        if owned is not None:
            copy = FindingCopy(record.id, tree.id, record.differs, quarantined, record.reproducible, time.time())
            owned.note([copy])

    def recorded(self, tree: Tree, record: Record, written: RecordBytes, *, is_first: bool) -> None:
        """Write a record to the log. It answers no call until it is there."""
        owned = self.owned_tree(tree.id)
        if owned is None:
            raise DroppedError(self._tasks_of[tree.id])
        try:
            copy = copy_of(tree.id, record, written, is_first=is_first)
            owned.write([*self._tree_lines(owned, tree), copy], record.id)
        except BaseException:
            # The tree has a record that the log lacks, so nothing of it may be answered any more.
            owned.fail("a record could not be written to the log")
            raise

    # -- kept states -------------------------------------------------------------------------------------------------

    def owned_tree(self, tree: int) -> Owned | None:
        """Return the task of a tree if this member owns it."""
        assert self._trees is not None
        task = self._tasks_of.get(tree) or self._tasks_of.setdefault(tree, self._trees.task_of(tree))
        return self.owned.get(task)

    async def write_kept(self, owned: Owned, tree: Tree, line: Kept) -> None:
        """Write to the log that the store has a state, behind the digest of the tree's root state.

        Raises:
            DroppedError: This member does not own the task any more.
        """
        await owned.write([*self._tree_lines(owned, tree), line])
        owned.kept[line.node] = line

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _enter(self, owned: Owned, rollout: Rollout, ingress: int, position: Position) -> None:
        """Write the ingress and the position of a rollout to the log.

        Raises:
            DroppedError: This member does not own the task any more.
        """
        line = Entered(rollout.id, ingress, position)
        owned.rules.enter(line)
        await asyncio.shield(owned.write([line]))
        owned.require()

    def _keep(self, rollout: Rollout, position: Position) -> None:
        origin = ORIGIN.get()
        if origin is None or origin.ingress == self.number:
            self.positions.put(rollout.id, position)
            if origin is not None:
                origin.is_accepted = True
        elif not origin.in_log:
            origin.positions[rollout.id] = position

    def _owner_of(self, rollout: Rollout) -> Owned:
        owned = self.owned.get(rollout.task)
        if owned is None or rollout.finished:
            raise DroppedError(rollout.task)
        return owned

    async def _await_report(self, owned: Owned, rollout: Rollout, until: float) -> None:
        """Wait for a report of an ingress.

        Raises:
            RefusalError: 503, none came in time.
        """
        if not await owned.await_change(until):
            name = self.name_of(owned.rules.entered[rollout.id].ingress)
            raise RefusalError(
                503,
                "position-unknown",
                f"only member {name!r} knows what rollout {rollout.name!r} was answered last, and it does not answer. "
                "Try again when it is back, or finish the rollout (DELETE).",
            )

    async def _confirm(self, rollout: Rollout) -> int:
        """Ask the ingress of this call whether an agent waits for it; return the turn of the question.

        Raises:
            RefusalError: 503, none does, or the ingress does not answer.
        """
        origin, turn = ORIGIN.get(), rollout.calls
        if origin is None or not await origin.confirm():
            raise RefusalError(
                503,
                "other-member",
                f"the calls of rollout {rollout.name!r} come through another member, and this one may be a late copy. "
                "Try again.",
            )
        return turn

    def _require_current(self) -> None:
        origin = ORIGIN.get()
        # What an answered call does in the background is no late copy of it.
        if origin is not None and not origin.is_over and not origin.is_current():
            origin.is_stale = True
            raise StaleCallError

    def _write(self, task: str, lines: list[Line]) -> None:
        """Write lines that the answer to this call waits for."""
        owned, origin = self.owned.get(task), ORIGIN.get()
        if owned is None:
            return
        written = owned.write(lines)
        if origin is not None and not origin.in_log:
            origin.pending.append(written)
        else:
            owned.note_written(written)

    def _tree_lines(self, owned: Owned, tree: Tree) -> list[Line]:
        """Return the line of a tree if the log lacks it, or has it without the digest of its root state."""
        assert self._copies is not None
        digest = None if tree.root.state is None else tree.root.state.exact
        if tree.id in owned.trees and owned.trees[tree.id] == digest:
            return []
        copy = self._copies.tree(tree.id)
        if copy is None:
            return []
        owned.trees[tree.id] = digest
        return [copy]
