"""What is found ahead of a tree's slices is what the whole tree has, whatever the tree, its damage, and the moment."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.storage import tree_reading
from proxy.storage.store import Store
from proxy.storage.tree_reading import TreeReading
from proxy.tree.keys import CallKey, call_key
from proxy.tree.tree import Node, Record, Tree, path
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect
from tests.proxy.storage.rig import opened, tree_of
from tests.proxy.storage.test_trees import Made, digest, grow, shape
from tests.proxy.test_damage import damage_row

CHANGES = (
    ("records", "target = target + 1"), ("records", "key = x'00'"), ("records", "private = 1 - private"),
    ("nodes", "exact = x'00'"), ("nodes", "diverged = ''"), ("findings", "quarantined = 0"),
)  # fmt: skip
makings = st.lists(
    st.builds(
        Made,
        st.sampled_from([-1, -1, -2, -3]),  # Mostly the newest nodes: long paths.
        st.integers(0, 2).map(lambda number: ToolCall("shell", "exec", {"command": str(number)})),
        st.just(ToolResult(200, "text/plain", b"")),
        st.sampled_from([Effect.FILES, Effect.FILES, Effect.NONE]),
        st.sampled_from([*map(digest, range(1, 9)), None]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=6, max_size=16,
)  # fmt: skip
"""Few calls, of which several lead to one state, so that histories part and meet."""
rarely = st.sampled_from([None, None, None, 0, 2, 5])
rarely = st.sampled_from([None, None, None, 0, 2, 5])


def grown(store: Store, made: list[Made], doubted: int | None, wrong: int | None) -> Tree:
    """Record a tree whose root has a digest; set one call aside, and put one into quarantine, if they are given."""
    tree = tree_of(store)
    tree.set_root_state(digest(0))
    store.records.save_node(tree.root)
    recorded = [record for record, _ in grow(store, tree, made)]
    changing = [record for record in recorded if record.target.origin is record]
    if changing and doubted is not None:
        record = changing[doubted % len(changing)]
        record.reproducible = False
        store.records.save_divergence(record, tree.set_aside(record, "lost"))
    if recorded and wrong is not None:
        record = recorded[wrong % len(recorded)]
        lost = tree.quarantine(record, "differs")
        store.audits.save_finding(tree.id, record, lost, quarantined=True)
    return tree


def ahead(reading: TreeReading, whole: Tree, keys: set[CallKey]) -> tuple[dict[int, Node], list[Record]]:
    """Return the nodes and records that are found now, each compared with the whole tree's."""
    nodes = {number: node for number in whole.nodes if (node := reading.tree.node(number)) is not None}
    records = []
    for number, node in nodes.items():
        known = whole.nodes[number]
        assert [record.id for record in path(node)] == [record.id for record in path(known)]
        assert (node.state, node.witness, node.diverged) == (known.state, known.witness, known.diverged)
        for key in keys if node.state is not None else ():
            record = reading.tree.record(node, key)
            if record is not None and not node.diverged:
                expected = known.records[key]
                assert (record.id, record.source) == (expected.id, node)
                assert record.target.id == expected.target.id
                records.append(record)
    return nodes, records


@pytest.mark.parametrize("change", [None, *CHANGES])
@settings(max_examples=15)
@given(makings, rarely, rarely, st.integers(0, 12), st.lists(st.integers(0, 4)))
def test_what_is_found_ahead_is_what_the_whole_tree_has(
    change: tuple[str, str] | None,
    made: list[Made],
    doubted: int | None,
    wrong: int | None,
    damaged: int,
    stops: list[int],
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_reading, "_PAGE_ROWS", 1)
        folder = Path(name)
        with opened(folder) as store:
            tree = grown(store, made, doubted, wrong)
            number = tree.id
            # Nothing is read back without a root.
            numbers = {"nodes": [each for each in tree.nodes if each != tree.root.id]}
            numbers |= {
                table: [row[0] for row in store.database.rows(f"SELECT {column} FROM {table}", ())]
                for table, column in (("records", "id"), ("findings", "record"))
            }
            keys = {record.key for node in tree.nodes.values() for record in node.records.values()}
            keys |= {record.key for record in tree.aside}
        if change is not None and (ids := numbers[change[0]]):
            column = "record" if change[0] == "findings" else "id"
            damage_row(folder, *change, f"{column} = {ids[damaged % len(ids)]}")
        with opened(folder) as store:
            whole, reading = store.trees.load(number), store.trees.reading(number, lambda _: None)
            found = ahead(reading, whole, keys) if reading.tells else ({}, [])
            for slices in stops:
                for _ in range(slices):
                    reading.step()
                if reading.tells:
                    nodes, records = ahead(reading, whole, keys)
                    assert nodes.items() >= found[0].items(), "the same objects, until the tree is whole and after it"
                    found = nodes, records
            while reading.step():
                pass
            assert reading.tree.unread is None
            assert shape(reading.tree) == shape(whole)
            assert list(reading.tree.nodes) == list(whole.nodes)
            for number, node in found[0].items():
                assert reading.tree.nodes[number] is node
            for record in found[1]:
                assert record.source.records[record.key] is record


@pytest.mark.parametrize("change", ["", "quarantined = 0", "tree = 99"])
def test_nothing_is_found_ahead_in_a_tree_with_quarantined_calls(tmp_path: Path, change: str) -> None:
    """What such a call takes with it is known when the tree is whole, also if what the audit found is damaged."""
    call, answer = ToolCall("shell", "exec", {"command": "a"}), ToolResult(200, "text/plain", b"")
    made = [Made(-1, call, answer, Effect.FILES, digest(number), private=False) for number in range(1, 5)]
    with opened(tmp_path) as store:
        tree = grown(store, made, None, 1)
        number, nodes = tree.id, list(tree.nodes)
    if change:
        damage_row(tmp_path, "findings", change)
    with opened(tmp_path) as store:
        reading = store.trees.reading(number)
        assert not reading.tells
        assert [reading.tree.node(each) for each in nodes] == [reading.tree.root, None, None, None, None]
        assert reading.tree.record(reading.tree.root, call_key(call)) is None
