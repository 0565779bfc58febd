"""The durable store: what was written is read back, whatever the tree; what is not ours is refused."""

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.storage.errors import StoreError
from proxy.storage.journal import JournalEntry
from proxy.storage.store import Store
from proxy.tree.keys import CallKey, call_key
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec

SPEC = EnvironmentSpec(files={"/root/f": "text\n"})


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    store = Store(folder / "forkpoint.sqlite")
    try:
        yield store
    finally:
        store.close()


def tree_of(store: Store, task: str = "task") -> Tree:
    store.tasks.put(task, None)
    return store.trees.open(task, "key", SPEC)


def digest(number: int) -> StateDigest:
    return StateDigest(number.to_bytes(32), (number // 2).to_bytes(32))


def rows(store: Store, table: str) -> int:
    return int(store.database.tables.table(table).count)


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
        place = tree.destination(source, made.effect, made.state, private=made.private)
        node = None if place.known else Node(store.records.new_node_id(), state=place.state, diverged=source.diverged)
        target = place.known or node
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
def test_a_tree_is_read_back_as_it_was(makings: list[Made], doubted: int, pinned: int) -> None:
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


def save(store: Store, tree: Tree, command: str, answer: bytes, body: bytes = b"") -> Record:
    call = ToolCall("shell", "exec", {"command": command}, body)
    record = Record(store.records.new_record_id(), call_key(call), tree.root, tree.root, Effect.NONE, 0.1, 1.0)
    store.records.save(tree.id, record, None, call, ToolResult(200, "text/plain", answer))
    tree.add_record(record)
    return record


def test_equal_answers_and_uploads_are_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        one, two = (save(store, tree, command, b"same" * 1000, b"upload" * 1000) for command in ("a", "b"))
        assert (one.answer, one.upload) == (two.answer, two.upload)
        assert one.call != two.call
        assert rows(store, "blobs") == 4


def test_a_large_answer_is_stored_smaller_where_that_helps(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"same" * 10_000)
        sizes = dict(store.database.rows("SELECT id, LENGTH(data) FROM blobs", ()))
        assert sizes[record.answer] < 1000
        assert store.records.result(record).body == b"same" * 10_000


def test_deleting_a_task_leaves_nothing_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for task, shared in (("kept", b"shared"), ("gone", b"shared")):
            tree = tree_of(store, task)
            record = save(store, tree, task, shared)
            rollout = store.rollouts.create(task, "r", tree.id, tree.root.id, "token-" + task)
            store.rollouts.fold([JournalEntry(rollout, 0, record.id, 1)])
        store.tasks.delete("gone")
        left = {table: rows(store, table) for table in ("tasks", "trees", "nodes", "records", "rollouts", "steps")}
        assert set(left.values()) == {1}, left
        assert rows(store, "blobs") == 2
        assert store.rollouts.by_token("token-gone") is None
        store.tasks.delete("kept")
        for table in (*left, "blobs"):
            assert rows(store, table) == 0, table


def test_each_protocol_s_word_on_a_rollout_stays_beside_the_others_until_its_end(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        one, other = (store.rollouts.create("task", name, tree.id, tree.root.id, name) for name in ("one", "other"))
        store.rollouts.put_note(one, "docker", '{"a":[1.5,null]}')
        store.rollouts.put_note(one, "e2b", '{"b":"\\u00e9"}')
        store.rollouts.put_note(one, "docker", '{"a":null}')
        store.rollouts.put_note(other, "e2b", "{}")
        assert store.rollouts.notes("task", "docker") == {"one": '{"a":null}'}
        assert store.rollouts.notes("task", "e2b") == {"one": '{"b":"\\u00e9"}', "other": "{}"}
        store.rollouts.finish(one)
        assert (store.rollouts.notes("task", "docker"), store.rollouts.notes("task", "e2b")) == ({}, {"other": "{}"})


def test_forgetting_nodes_deletes_the_answers_that_nothing_else_needs(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        kept, gone = save(store, tree, "a", b"shared"), save(store, tree, "b", b"shared")
        store.records.forget([], [gone])
        assert store.records.result(kept).body == b"shared"
        assert rows(store, "blobs") == 2


def test_steps_that_are_folded_twice_count_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"")
        rollout = store.rollouts.create("task", "r", tree.id, tree.root.id, "token")
        steps = [JournalEntry(rollout, turn, record.id, 0) for turn in range(3)]
        store.rollouts.fold(steps)
        store.rollouts.fold(steps[1:])
        assert [turn for turn, _, _ in store.rollouts.steps(rollout)] == [0, 1, 2]
        assert store.rollouts.of_task("task")[0]["calls"] == 3


def test_what_a_transaction_could_not_finish_is_not_there(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"first")
        call = ToolCall("shell", "exec", {"command": "b"})
        clash = Record(record.id, CallKey(b"k" * 32), tree.root, tree.root, Effect.NONE, 0.1, 1.0)
        with pytest.raises(StoreError, match="could not be written"):
            store.records.save(tree.id, clash, None, call, ToolResult(200, "text/plain", b"second"))
        assert rows(store, "blobs") == 2
        assert rows(store, "records") == 1
        save(store, tree, "c", b"the store goes on")


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path, content = tmp_path / "forkpoint.sqlite", b"not a database at all, but long enough to be one" * 100
    path.write_bytes(content)
    with pytest.raises(StoreError, match="cannot be used as Forkpoint's store"):
        Store(path)
    assert path.read_bytes() == content


def test_a_store_of_another_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree_of(store)
    path = tmp_path / "forkpoint.sqlite"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="schema 99, this Forkpoint reads"):
        Store(path)
    assert path.read_bytes() == before


def test_a_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "forkpoint.sqlite")
    with connection:
        connection.execute("CREATE TABLE records (somebody TEXT)")
    connection.close()
    before = (tmp_path / "forkpoint.sqlite").read_bytes()
    with pytest.raises(StoreError, match="another program's database, with tables records"):
        Store(tmp_path / "forkpoint.sqlite")
    assert (tmp_path / "forkpoint.sqlite").read_bytes() == before


def test_names_of_nodes_and_records_are_not_used_again_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"")
        rollout = store.rollouts.create("task", "r", tree.id, tree.root.id, "token")
        store.rollouts.fold([JournalEntry(rollout, 0, record.id, 0)])
        store.records.forget([], [record])
    with opened(tmp_path) as again:
        assert again.records.new_record_id() > record.id, "or the rollout's history would show another call"
