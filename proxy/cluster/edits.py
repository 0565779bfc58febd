"""What people change of a task, as lines of its log."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from proxy.cluster.lines import ForgottenRows, Line
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.protocol import Ended
from proxy.storage.copies import CopyStore, EndedCopy, MasksCopy, NodeCopy
from proxy.tree.tree import Node, Record, Tree

if TYPE_CHECKING:
    from proxy.storage.copies import TreeCopy

IMPORTED_ROW = 200
"""Most records of an import in one row of the log: as many are read from the store while calls wait."""


class ClusterEdits:
    """Implements `proxy.execution.gate.EditLog`."""

    copies: CopyStore  # The rows of the store, which is created later.

    def __init__(self, owned: Mapping[str, Owned], owner_of: Callable[[int], Owned | None]) -> None:
        """Write for the tasks that this member owns; `owner_of` returns the one of a tree, by its number."""
        self._owned, self._owner_of = owned, owner_of

    def changed(self, tree: Tree, nodes: Iterable[Node]) -> None:
        """Write to the log what people have changed of nodes."""
        note(self._owner_of(tree.id), [NodeCopy(node.id, node.diverged, node.pinned) for node in nodes])

    def forgot(self, tree: Tree, nodes: Iterable[Node], records: Iterable[Record]) -> None:
        """Write to the log that nodes and records were deleted."""
        line = ForgottenRows([node.id for node in nodes], [record.id for record in records])
        note(self._owner_of(tree.id), [line])

    def labelled(self, task: str, rollout: int) -> None:
        """Write the labels of a rollout that is not in memory to the log."""
        copy = self.copies.rollout(rollout)
        if isinstance(copy, EndedCopy):
            # The line of a rollout says that it runs.
            note(self._owned.get(task), [copy.rollout, Ended(rollout)])
        elif copy is not None:
            note(self._owned.get(task), [copy])

    def masked(self, task: str, masks: str) -> None:
        """Write the noise masks of a task to the log."""
        note(self._owned.get(task), [MasksCopy(task, masks)])

    async def importing(self, task: str, tree: int) -> None:
        """Write the records of a tree to the log. They count when the tree is there too."""
        owned, last = self._owned.get(task), -1
        if owned is None:
            raise DroppedError(task)
        while records := self.copies.records(tree, last, IMPORTED_ROW):
            last = records[-1].record
            await asyncio.shield(owned.write(records))

    def imported(self, task: str, tree: Tree, replaced: int | None) -> None:
        """Write to the log that a task has got a tree, after its records."""
        owned, copy = self._owned.get(task), self.copies.task(task)
        if owned is not None and copy is not None:
            gone = [] if replaced is None else [ForgottenRows([replaced], [])]
            lines = tree_lines(self.copies, owned, tree)
            owned.note([*gone, *lines, *self.copies.pinned(tree.id), copy])


def tree_lines(copies: CopyStore, owned: Owned, tree: Tree) -> "list[TreeCopy]":
    """Return the line of a tree if the log lacks it, or has it without the digest of its root state."""
    digest = None if tree.root.state is None else tree.root.state.exact
    if tree.id in owned.trees and owned.trees[tree.id] == digest:
        return []
    copy = copies.tree(tree.id)
    if copy is None:
        return []
    owned.trees[tree.id] = digest
    return [copy]


def note(owned: Owned | None, lines: Sequence[Line]) -> None:
    """Write lines to the log of a task, unless another member owns it by now."""
    if owned is not None and lines:
        owned.note(lines)
