"""Rows that travel between stores keep their numbers, and make the same tree there."""

import asyncio
from pathlib import Path

import pytest

from proxy.storage.copies import Copy, FindingCopy, RecordCopy, copy_of
from proxy.storage.database import BLOCK
from proxy.storage.errors import StoreError
from proxy.storage.records import RecordBytes
from proxy.storage.store import Store
from proxy.tree.keys import CallKey
from proxy.tree.tree import Record, Tree
from sandboxes.calls import ResourceUse
from tests.proxy.rig import ask, engine

COMMANDS = ("echo a > f", "cat f", "echo b >> f", "cat f", "sleep 1 &", "cat f")


def walk(folder: Path) -> None:
    """Let two rollouts of one task make calls, and end a third one."""

    async def run() -> None:
        async with engine(folder) as running:
            first, second, third = [await running.tasks.rollout("task", name) for name in ("r1", "r2", "r3")]
            for command in COMMANDS:
                await ask(running, first, command)
            for command in ("echo a > f", "rm f"):
                await ask(running, second, command)
            await ask(running, third, "ls")
            await running.tasks.rollouts.finish(third)
            await running.tasks.rollout("other", "r1")

    asyncio.run(run())


def written(store: Store, record: Record) -> RecordBytes:
    """Return what was written when a record was saved."""
    call, upload, answer = (
        store.blobs.read(blob) if blob else b"" for blob in (record.call, record.upload, record.answer)
    )
    return RecordBytes(call, upload, answer, store.records.resources(record) or ResourceUse())


def copies_of(store: Store, task: str) -> list[Copy]:
    """Return all that a store has of a task, in the order in which it came up."""
    tree_id, _ = store.database.row("SELECT id, root FROM trees WHERE task = ?", (task,)) or (0, 0)
    tree = store.trees.load(tree_id)
    records = sorted((r for node in tree.nodes.values() for r in node.records.values()), key=lambda r: r.id)
    rollouts = store.rollouts.of_task(task, running=True)
    made = [
        store.copies.task(task),
        store.copies.tree(tree_id),
        *(copy_of(tree_id, r, written(store, r), is_first=r.target.origin is r) for r in records),
        *(store.copies.rollout(row["id"]) for row in rollouts),
    ]
    return [copy for copy in made if copy is not None]


def shown(store: Store, tree: Tree) -> list[object]:
    """Return what answers and positions depend on."""
    tree.check()
    return [
        (node.id, node.state, node.witness, sorted(
            (
                r.key, r.id, r.target.id, r.effect, r.private, r.age_s, store.records.result(r), store.records.call(r),
                store.records.resources(r),
            )
            for r in node.records.values()
        ))
        for node in sorted(tree.nodes.values(), key=lambda node: node.id)
    ]  # fmt: skip


def opened(folder: Path, block: int = 0) -> Store:
    return Store(folder / "forkpoint.sqlite", block=block)


def test_a_copied_task_is_the_same(tmp_path: Path) -> None:
    """Nodes, records, answers and positions, also when it is written twice."""
    walk(tmp_path / "a")
    ours, theirs = opened(tmp_path / "a"), opened(tmp_path / "b", block=3)
    copies = copies_of(ours, "task")
    assert len(copies) >= 10
    for _ in range(2):
        theirs.copies.replace("task", copies)
        tree_id = ours.trees.ids_of("task")[0]
        assert shown(theirs, theirs.trees.load(tree_id)) == shown(ours, ours.trees.load(tree_id))
        columns = ("id", "name", "tree", "start", "node", "calls", "finished", "whole", "root")
        positions = [
            [[row[name] for name in columns] for row in store.rollouts.of_task("task", running=True)]
            for store in (ours, theirs)
        ]
        assert positions[0] == positions[1]
        assert len(positions[0]) == 2
    for store in (ours, theirs):
        store.close()


def test_a_finding_keeps_its_record_from_answering(tmp_path: Path) -> None:
    """Also in a store that has never audited it."""
    walk(tmp_path / "a")
    ours, theirs = opened(tmp_path / "a"), opened(tmp_path / "b", block=3)
    copies = copies_of(ours, "task")
    tree_id = ours.trees.ids_of("task")[0]
    record = next(copy for copy in copies if isinstance(copy, RecordCopy))
    theirs.copies.replace("task", [*copies, FindingCopy(record.record, tree_id, "files", True, False, 2.0)])
    assert CallKey(record.key) in ours.trees.load(tree_id).nodes[record.source].records
    source = theirs.trees.load(tree_id).nodes[record.source]
    assert CallKey(record.key) in source.quarantined
    assert CallKey(record.key) not in source.records
    assert [found[0] for found in theirs.audits.findings(tree_id)] == [record.record]
    for store in (ours, theirs):
        store.close()


def test_what_no_copy_names_is_gone(tmp_path: Path) -> None:
    """A row that never came into the log was never answered from. Other tasks stay."""
    walk(tmp_path / "a")
    store = opened(tmp_path / "a")
    copies = copies_of(store, "task")
    last = store.database.take_number("records")
    store.copies.replace("task", copies[:4])
    tree = store.trees.load(store.trees.ids_of("task")[0])
    assert sum(len(node.records) for node in tree.nodes.values()) == 2
    assert store.rollouts.of_task("task", running=True) == []
    assert len(store.rollouts.of_task("other", running=True)) == 1
    store.close()
    again = opened(tmp_path / "a")
    # The numbers of deleted rows are in URLs and steps, so they never come back.
    assert again.database.take_number("records") > last
    again.close()


def test_each_store_gives_out_its_own_numbers(tmp_path: Path) -> None:
    """Rows of other blocks do not move the next number."""
    walk(tmp_path / "a")
    ours, theirs = opened(tmp_path / "a"), opened(tmp_path / "b", block=2)
    theirs.copies.replace("task", copies_of(ours, "task"))
    assert theirs.database.take_number("nodes") == 2 * BLOCK + 1
    theirs.copies.replace("task", copies_of(ours, "task"))
    theirs.close()
    again = opened(tmp_path / "b", block=2)
    assert again.database.take_number("nodes") == 2 * BLOCK + 2
    first = ours.database.take_number("nodes")
    ours.copies.replace("task", copies_of(ours, "task"))
    ours.close()
    again.close()
    reopened = opened(tmp_path / "a")
    assert first < reopened.database.take_number("nodes") < BLOCK
    reopened.close()


def test_a_failed_replacement_changes_nothing(tmp_path: Path) -> None:
    """A copy that comes twice is a defect of the log."""
    walk(tmp_path / "a")
    store = opened(tmp_path / "a")
    copies = copies_of(store, "task")
    before = shown(store, store.trees.load(store.trees.ids_of("task")[0]))
    with pytest.raises(StoreError):
        store.copies.replace("task", [*copies, copies[2]])
    assert shown(store, store.trees.load(store.trees.ids_of("task")[0])) == before
    store.close()
