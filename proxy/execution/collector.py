"""Trees are kept from Python's garbage collector, whose full collections would hold up every hit.

A full collection looks at every object, and nothing else runs meanwhile: 0.5 us for each node or record, so half a
second for a million. What is *frozen* is not looked at (`gc.freeze`), and is freed all the same when nothing refers to
it any more. Only what refers to itself in a circle is not, such as the nodes and records of a closed tree: all is
thawed and collected when much of that may have gathered.
"""

import gc

from proxy.execution.open_trees import OpenTrees

FREEZE_RECORDS = 4_000
"""Nodes and records that are frozen at once, after a collection of some 2 ms. Halved, it takes 1 ms, twice as often."""
THAW_RECORDS = 50_000
"""Least nodes and records that have been dropped before all is thawed; they take some 50 MB."""
THAW_SHARE = 0.5
"""Share of the nodes and records in memory that have been dropped before all is thawed.

A collection then costs each dropped record what it would cost two that stay.
"""


class Collector:
    """Decides when the trees in memory are frozen and thawed. One a process, like the garbage collector itself."""

    def __init__(self, trees: OpenTrees) -> None:
        self._trees = trees
        self._frozen, self._dropped = 0, 0

    async def settle(self) -> None:
        """Freeze what was recorded since the last time, if it is much. 2 ms, or 0.5 s for a million at a thaw."""
        added, dropped = self._trees.added, self._trees.dropped
        thaws = dropped - self._dropped >= max(THAW_RECORDS, THAW_SHARE * (added - dropped))
        if thaws:
            gc.unfreeze()
            self._dropped = dropped
        if thaws or added - self._frozen >= FREEZE_RECORDS:
            # Garbage that is frozen would stay.
            gc.collect()
            gc.freeze()
            self._frozen = added
