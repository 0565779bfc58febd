"""The columns of a tree: any part of it, in the order in which its nodes were made."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.tree import Node, Tree
from proxy.ui.columns import columns_of
from sandboxes.spec import EnvironmentSpec


@given(st.sets(st.integers(2, 60), max_size=20), st.integers(0, 61), st.integers(1, 25))
def test_columns_after_a_node_are_ordered(ids: set[int], after: int, limit: int) -> None:
    tree = Tree(1, Node(1), EnvironmentSpec(driver="memory"))
    for number in sorted(ids):
        tree.add_node(Node(number))
    wanted = [number for number in sorted({1, *ids}) if number > after]
    columns, _, more = asyncio.run(columns_of(tree, after, limit))
    assert columns.id == wanted[:limit]
    assert more == (len(wanted) > limit)
    assert {len(column) for column in vars(columns).values()} == {len(columns.id)}
