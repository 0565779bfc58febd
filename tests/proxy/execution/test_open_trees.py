"""Trees come back into memory in slices, and never an older state of them."""

import asyncio
from pathlib import Path

import pytest

from proxy.execution.open_trees import OpenTrees
from proxy.storage import trees as tree_store
from proxy.storage.store import Store
from tests.proxy.execution.trees import with_twenty_records
from tests.proxy.storage.rig import save


def test_others_run_while_a_tree_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_store, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 10, "twenty records are ten pages"
        tree = trees.get(number)
        assert tree is not None
        assert set(tree.root.records) == set(store.trees.load(number).root.records)
        assert len(tree.root.records) == 20

    with_twenty_records(tmp_path, test)


def test_a_tree_that_was_in_memory_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have got records that the slices which were read before lack, also if it has left the memory again."""
    monkeypatch.setattr(tree_store, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        await asyncio.sleep(0)
        save(store, trees.load(number), "echo new", b"new")
        trees.close(number)
        await reading
        assert trees.get(number) is None
        assert len(trees.load(number).root.records) == 21

    with_twenty_records(tmp_path, test)


def test_a_tree_deleted_meanwhile_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_store, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        await asyncio.sleep(0)
        with store.database.transaction() as execute:
            execute("DELETE FROM trees WHERE id = ?", (number,))
        await reading
        assert trees.get(number) is None

    with_twenty_records(tmp_path, test)
