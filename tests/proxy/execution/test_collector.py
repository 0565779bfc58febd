"""The garbage collector does not look at the trees in memory, and closed ones are collected all the same."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.execution import open_trees
from proxy.execution.open_trees import Collector, OpenTrees
from proxy.storage import tree_reading
from proxy.storage.store import Store
from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record
from sandboxes.effects import Effect
from tests.proxy.execution.trees import with_twenty_records


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Mark(str):
    """A text that a weak reference can point to."""

    __slots__ = ("__weakref__",)


def is_looked_at(thing: object) -> bool:
    return any(looked_at is thing for looked_at in gc.get_objects())


@pytest.mark.parametrize(("enough", "frozen"), [(21, True), (22, False)])
def test_many_new_records_are_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int, frozen: bool
) -> None:
    monkeypatch.setattr(open_trees, "FREEZE_RECORDS", enough)

    async def test(_: Store, trees: OpenTrees, number: int) -> None:
        tree = trees.load(number)
        assert is_looked_at(tree)
        await Collector(trees).settle()
        assert is_looked_at(tree) is not frozen

    with_twenty_records(tmp_path, test)


@pytest.mark.parametrize("thaws", [True, False])
def test_closed_trees_are_collected_if_they_were_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thaws: bool
) -> None:
    monkeypatch.setattr(open_trees, "FREEZE_RECORDS", 1)
    monkeypatch.setattr(open_trees, "THAW_RECORDS", 21 if thaws else 22)

    async def test(_: Store, trees: OpenTrees, number: int) -> None:
        settling = Collector(trees)
        # The root and its records refer to each other, so only a collection frees them.
        trees.load(number).root.unfreezable = mark = Mark()
        held = weakref.ref(mark)
        del mark
        await settling.settle()
        trees.close(number)
        await settling.settle()
        assert (held() is None) is thaws

    with_twenty_records(tmp_path, test)


def test_forgotten_nodes_count_as_dropped(tmp_path: Path) -> None:
    async def test(_: Store, trees: OpenTrees, number: int) -> None:
        tree = trees.load(number)
        node = Node(1 << 40)
        tree.add_node(node)
        origin = Record(1 << 40, CallKey(b"k"), tree.root, node, Effect.FILES, 0.1, 1.0)
        tree.add_record(origin)
        node.origin = origin
        tree.forget(node)
        assert trees.dropped == 2
        assert trees.added == tree.size
        trees.close(number)
        assert trees.added == trees.dropped == tree.size

    with_twenty_records(tmp_path, test)


def test_a_tree_that_is_read_back_is_frozen_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_reading, "_PAGE_ROWS", 2)
    monkeypatch.setattr(open_trees, "_SLICES_FROZEN", 1)

    async def test(_: Store, trees: OpenTrees, number: int) -> None:
        await trees.read_back(number)
        tree = trees.get(number)
        assert tree is not None
        assert not is_looked_at(tree)

    with_twenty_records(tmp_path, test)
