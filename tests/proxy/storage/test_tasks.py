"""Deleting a task deletes what only it used."""

import asyncio
from pathlib import Path

import pytest

from proxy.storage import drafts
from proxy.storage.drafts import leave_remains
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.store import Store
from tests.proxy.storage.rig import opened, rows, save, tree_of


def test_deleting_a_task_deletes_all_its_rows(tmp_path: Path) -> None:
    """Blobs that another task uses stay until that task is deleted, too."""
    with opened(tmp_path) as store:
        for task, shared in (("kept", b"shared"), ("gone", b"shared")):
            tree = tree_of(store, task)
            record = save(store, tree, task, shared)
            rollout = store.rollouts.create(task, "r", tree.id, tree.root.id, "token-" + task)
            store.rollouts.fold([JournalEntry(rollout, 0, record.id, 1)])
        store.tasks.delete("gone")
        assert [rows(store, table) for table in ("tasks", "trees", "rollouts")] == [1, 1, 1]
        asyncio.run(store.drafts.sweep())
        counts = {table: rows(store, table) for table in ("tasks", "trees", "nodes", "records", "rollouts", "steps")}
        assert set(counts.values()) == {1}, counts
        asyncio.run(store.blobs.delete_unused())
        assert rows(store, "blobs") == 2
        assert store.rollouts.by_token("token-gone") is None
        store.tasks.delete("kept")
        asyncio.run(store.drafts.sweep())
        asyncio.run(store.blobs.delete_unused())
        for table in (*counts, "blobs"):
            assert rows(store, table) == 0, table


def walked(store: Store, task: str, calls: int) -> None:
    """Record calls of a rollout."""
    tree = tree_of(store, task)
    rollout = store.rollouts.create(task, "r", tree.id, tree.root.id)
    records = [save(store, tree, f"{task} {turn}", b"answer %d" % turn) for turn in range(calls)]
    store.rollouts.fold([JournalEntry(rollout, turn, record.id, 1) for turn, record in enumerate(records)])


def test_a_large_task_is_deleted_in_slices_that_a_restart_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tasks of the event loop run between the slices; what is left after a kill goes with the next sweep."""
    monkeypatch.setattr(drafts, "SLICE_S", 0.0)
    with opened(tmp_path) as store:
        walked(store, "kept", 10)
        walked(store, "gone", 4 * drafts._ROWS)
        store.tasks.delete("gone")

        async def begun() -> None:
            sweep = asyncio.ensure_future(store.drafts.sweep())
            for _ in range(3):
                await asyncio.sleep(0)
            sweep.cancel()

        asyncio.run(begun())
        assert 10 < rows(store, "records") < 4 * drafts._ROWS
    with opened(tmp_path) as store:
        # A new task of this name meets nothing of the old one.
        assert tree_of(store, "gone").size == 1
        assert store.trees.load(tree_of(store, "gone").id).size == 1
        asyncio.run(store.drafts.sweep())
        assert [rows(store, table) for table in ("records", "steps")] == [10, 10]
        asyncio.run(store.blobs.sweep())
        assert rows(store, "blobs") == 20
        assert store.database.rows("SELECT name FROM meta WHERE name GLOB 'remains*'", ()) == []


def test_remains_of_what_is_there_are_left_alone(tmp_path: Path) -> None:
    """A mark that names a tree and a rollout which exist deletes none of their rows."""
    with opened(tmp_path) as store:
        walked(store, "task", 3)
        ((tree,),) = store.database.rows("SELECT id FROM trees", ())
        ((rollout,),) = store.database.rows("SELECT id FROM rollouts", ())
        with store.database.transaction() as execute:
            leave_remains(execute, trees=[tree], rollouts=[rollout])
        asyncio.run(store.drafts.sweep())
        assert [rows(store, table) for table in ("records", "steps")] == [3, 3]
        assert store.database.rows("SELECT name FROM meta WHERE name GLOB 'remains*'", ()) == []


def test_no_tree_gets_the_number_of_a_killed_import(tmp_path: Path) -> None:
    """Its rows are still there after the restart."""
    with opened(tmp_path) as store:
        store.database.take_number("trees", 5)
        draft = store.drafts.begin(1, 1)
        with store.database.transaction() as execute:
            store.drafts.add_node(execute, draft, 0, None, None, pinned=False)
            execute("DELETE FROM meta WHERE name GLOB 'last *'")
    with opened(tmp_path) as store:
        assert draft.tree not in [tree_of(store, f"task {number}").id for number in range(8)]
        asyncio.run(store.drafts.sweep())
        assert rows(store, "nodes") == 8
