"""Trees on disk that are not in memory, for tests of what reads them back."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from proxy.execution.open_trees import OpenTrees
from proxy.storage.store import Store
from tests.proxy.storage.rig import opened, save, tree_of

if TYPE_CHECKING:
    from snapshots.cache import SnapshotCache


class NoSnapshots:
    """A cache without snapshots."""

    def reattach(self, _tree: int, _nodes: object) -> None:
        return


def with_twenty_records(folder: Path, test: Callable[[Store, OpenTrees, int], Awaitable[None]]) -> None:
    """Run a test on a store with a tree of twenty records that is not in memory."""
    with opened(folder) as store:
        tree = tree_of(store)
        for number in range(20):
            save(store, tree, f"echo {number}", b"%d" % number)
        trees, number = OpenTrees(store.trees, cast("SnapshotCache", NoSnapshots()), lambda _: ()), tree.id
        del tree

        async def body() -> None:
            await test(store, trees, number)

        asyncio.run(body())
