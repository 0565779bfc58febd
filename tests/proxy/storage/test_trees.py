"""A tree that was written is read back unchanged, whatever the tree."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.storage import tree_reading
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.store import Store
from proxy.tree.keys import call_key
from proxy.tree.rollout import Outcome
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect, StateDigest
from tests.proxy.storage.rig import opened, save, tree_of


def digest(number: int) -> StateDigest:
    return StateDigest(number.to_bytes(32), (number // 2).to_bytes(32))


@dataclass(frozen=True)
class Made:
    """One call to record: at the node-th known node, with this effect, leading to this state."""

    at: int
    call: ToolCall
    result: ToolResult
    effect: Effect
    state: StateDigest | None
    private: bool


calls = st.builds(
    ToolCall,
    st.just("shell"),
    st.sampled_from(["exec", "put"]),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers(-9, 9) | st.none(), max_size=3),
    st.binary(max_size=3000),
)
results = st.builds(
    ToolResult, st.integers(200, 599), st.sampled_from(["application/json", "text/plain; charset=utf-8"]), st.binary()
)
effects = st.integers(0, 31).map(Effect)
makings = st.lists(
    st.builds(
        Made, st.integers(0, 50), calls, results, effects, st.none() | st.integers(1, 6).map(digest), st.booleans()
    ),
    max_size=12,
)


def grow(store: Store, tree: Tree, makings: list[Made]) -> list[tuple[Record, Made]]:
    """Record calls as the proxy does; one that is known already is left out."""
    nodes, recorded = [tree.root], []
    for made in makings:
        source, key = nodes[made.at % len(nodes)], call_key(made.call)
        if key in source.records:
            continue
        destination = tree.destination(source, made.effect, made.state, private=made.private)
        node = None
        if not destination.known:
            node = Node(store.records.new_node_id(), state=destination.state, diverged=source.diverged)
        target = destination.known or node
        assert target is not None
        record = Record(
            store.records.new_record_id(), key, source, target, made.effect, 0.5, 7.0, private=made.private
        )  # fmt: skip
        store.records.save(tree.id, record, node, made.call, made.result)
        if node is not None:
            tree.add_node(node, private=made.private)
            nodes.append(node)
        tree.add_record(record)
        recorded.append((record, made))
    return recorded


def shape(tree: Tree) -> Any:
    """Return all that a tree knows, as plain values."""
    tree.check()
    records = [r for node in tree.nodes.values() for r in node.records.values()]
    return (
        tree.id,
        tree.root.id,
        tree.spec,
        {(n.id, n.state, n.pinned, n.diverged, n.origin.id if n.origin else None) for n in tree.nodes.values()},
        {
            (r.id, r.key, r.source.id, r.target.id, r.effect, r.seconds, r.recorded_at, r.private, r.reproducible)
            for r in records
        },
        {r.id for r in tree.aside},
    )


@settings(max_examples=60)
@given(makings, st.integers(0, 20), st.integers(0, 20))
def test_a_tree_is_read_back_unchanged(makings: list[Made], doubted: int, pinned: int) -> None:
    """Any tree, with pins and divergences, is the same after the store was closed and opened."""
    with tempfile.TemporaryDirectory() as folder:
        with opened(Path(folder)) as store:
            tree = tree_of(store)
            recorded = grow(store, tree, makings)
            node = list(tree.nodes.values())[pinned % len(tree.nodes)]
            node.pinned = True
            store.records.save_node(node)
            changing = [record for record, _ in recorded if record.target.origin is record]
            if changing:
                record = changing[doubted % len(changing)]
                record.reproducible = False
                store.records.save_divergence(record, tree.set_aside(record, "lost"))
            before = shape(tree)
        with opened(Path(folder)) as again:
            tree = tree_of(again)
            assert shape(tree) == before
            for record, made in recorded:
                known = tree.nodes[record.source.id].records.get(record.key)
                if known is not None:
                    assert again.records.call(known) == made.call
                    assert again.records.result(known) == made.result
                    assert known.key == call_key(again.records.call(known))


def test_long_rollouts_are_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted a few at a time, so that hits of other tasks wait for few of them; no count is lost."""
    monkeypatch.setattr(tree_reading, "_STEPS_AT_ONCE", 5)
    monkeypatch.setattr(tree_reading, "_RECORDS_OF_A_COUNT", 2)
    with opened(tmp_path) as store:
        tree = tree_of(store)
        records = [save(store, tree, f"echo {number}", b"") for number in range(5)]
        for name in "abcd":
            rollout = store.rollouts.create("task", name, tree.id, tree.root.id)
            steps = [JournalEntry(rollout, turn, record.id, Outcome.HIT) for turn, record in enumerate(records)]
            store.rollouts.fold(steps)
        slices = sum(1 for _ in store.trees.reading(tree.id)._uses())
        again = store.trees.load(tree.id)
    # One at the end of the page, and one before each rollout but the first.
    assert slices == 4
    # The first of four uses was a miss.
    assert [record.hits for record in again.root.records.values()] == [3] * 5
