"""Deleting a task deletes what only it used."""

import asyncio
from pathlib import Path

from proxy.storage.journal_segments import JournalEntry
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
        counts = {table: rows(store, table) for table in ("tasks", "trees", "nodes", "records", "rollouts", "steps")}
        assert set(counts.values()) == {1}, counts
        asyncio.run(store.blobs.delete_unused())
        assert rows(store, "blobs") == 2
        assert store.rollouts.by_token("token-gone") is None
        store.tasks.delete("kept")
        asyncio.run(store.blobs.delete_unused())
        for table in (*counts, "blobs"):
            assert rows(store, table) == 0, table
