"""Damaged rows of audits, notes, shared trees and marks lead to errors or new executions, and never to an answer."""

import asyncio
from pathlib import Path

import pytest

from proxy.refusals import RefusalError
from proxy.storage.database import BLOCK
from proxy.storage.errors import DamagedError, StoreError
from proxy.storage.store import Store
from proxy.tree.rollout import Outcome
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import ask, engine
from tests.proxy.storage.rig import SPEC, opened, save, tree_of
from tests.proxy.test_damage import WHOLE, damage_row, killed_with_steps, positions
from tests.proxy.test_restart import open_engine
from tests.sandboxes.memory_driver import MemoryDriver


@pytest.mark.parametrize("change", ["record = 99", "tree = 99", "quarantined = 0", "why = ''"])
def test_a_lost_finding_frees_no_record(tmp_path: Path, change: str) -> None:
    """An audit put a record into quarantine, and its finding is damaged. The call still runs again for each rollout."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo wrong")
            (record,) = rollout.tree.root.records.values()
            lost = rollout.tree.quarantine(record, "differs")
            running.store.audits.save_finding(rollout.tree.id, record, lost, quarantined=True)
        damage_row(tmp_path, "findings", change)
        async with engine(tmp_path) as again:
            rollout = await again.tasks.rollout("task", "second")
            assert (await ask(again, rollout, "echo wrong"))[1] is Outcome.BYPASS
            assert again.store.database.damaged == {"findings": 1}
            assert again.store.audits.findings(rollout.tree.id) == []

    asyncio.run(body())


def test_a_damaged_note_loses_its_rollout(tmp_path: Path) -> None:
    """Notes hold the variables of a sandbox's commands, for example. The rollout is refused; others go on."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            for name in ("first", "other"):
                rollout = await running.tasks.rollout("task", name)
                await ask(running, rollout, "echo 1 > a")
                running.tasks.rollouts.note(rollout, "e2b", '{"envs": {"KEY": "right"}}')
        damage_row(tmp_path, "notes", "value = replace(value, 'right', 'wrong')")
        for _ in range(2):
            async with engine(tmp_path) as again:
                with pytest.raises(RefusalError, match="what a protocol remembers of it is damaged"):
                    await again.tasks.rollout("task", "first")
                assert (await again.tasks.rollout("task", "other")).calls == 1
                assert again.store.notes.of_task("task", "e2b") == {"other": '{"envs":{"KEY":"right"}}'}
        async with engine(tmp_path) as last:
            await last.tasks.open("task")
            assert await last.tasks.dismiss("task", "first")
        with opened(tmp_path) as store:
            assert store.database.damaged == {}

    asyncio.run(body())


@pytest.mark.parametrize(
    "change",
    [
        # The number, to that of a rollout with no note of its own, and to one that no rollout has.
        "rollout = 3", "rollout = 99",
        # The number's copy; and texts without one, as an earlier version wrote them, or that are no JSON.
        "value = json_set(value, '$.rollout', 2)", "value = json_remove(value, '$.rollout')",
        "value = substr(value, 3)",
    ],
)  # fmt: skip
def test_a_note_of_unknown_owner_loses_all_it_may_belong_to(tmp_path: Path, change: str) -> None:
    """It cannot be known whose note it was. Only a rollout with a whole note of its own goes on."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            for name in ("owner", "whole", "bare"):
                rollout = await running.tasks.rollout("task", name)
                await ask(running, rollout, "echo 1 > a")
                if name != "bare":
                    running.tasks.rollouts.note(rollout, "e2b", '{"envs": {"KEY": "right"}}')
        damage_row(tmp_path, "notes", change, "rollout = 1")
        async with engine(tmp_path) as again:
            for name in ("owner", "bare"):
                with pytest.raises(RefusalError, match="what a protocol remembers of it is damaged"):
                    await again.tasks.rollout("task", name)
            assert (await again.tasks.rollout("task", "whole")).calls == 1

    asyncio.run(body())


def test_a_damaged_share_opens_no_tree(tmp_path: Path) -> None:
    """A row that says who uses a shared tree is damaged: no other task gets the tree, and nobody loses it."""
    spec = EnvironmentSpec(files=SPEC.files, share="on")
    with opened(tmp_path) as store:
        for task in ("first", "second"):
            tree = store.trees.open(task, "key", spec)
            store.trees.share(task, tree.id)
    damage_row(tmp_path, "shares", "task = 'other'", "task = 'second'")
    with opened(tmp_path) as store:
        assert [store.trees.ids_of(task) for task in ("first", "second", "other")] == [[tree.id], [], []]
        assert store.trees.sole_ids("first") == []
        assert store.trees.id_with_node("other", tree.root.id) is None
        # The next use of the tree writes it again.
        store.trees.share("second", tree.id)
        assert store.trees.ids_of("second") == [tree.id]


def test_damaged_masks_are_an_error(tmp_path: Path) -> None:
    """With other masks an audit could take a difference for noise."""
    with opened(tmp_path) as store:
        store.audits.put_masks("task", '{"patterns": ["a"]}')
        store.audits.add(1, "hits", 10, 0, 0)
    damage_row(tmp_path, "masks", "value = '{}'")
    damage_row(tmp_path, "audits", "checked = 1000")
    with opened(tmp_path) as store:
        with pytest.raises(DamagedError, match="PUT them again"):
            store.audits.masks("task")
        store.audits.put_masks("task", "{}")
        assert store.audits.masks("task") == "{}"
        store.audits.add(1, "hits", 10, 0, 0)
        assert store.audits.totals() == []
        assert store.database.damaged == {"masks": 1, "audits": 1}


@pytest.mark.parametrize("change", ["value = replace(value, 'true', 'false')", "name = 'jourmal'"])
def test_a_damaged_mark_of_the_journal_loses_rollouts(tmp_path: Path, change: str) -> None:
    """Which segments there must be is not known, so steps may be missing."""

    async def body() -> None:
        await killed_with_steps(tmp_path)
        damage_row(tmp_path, "meta", change, "name = 'journal'")
        running = await open_engine(tmp_path, MemoryDriver())
        assert await positions(running) == dict.fromkeys(WHOLE, "rollout-lost")
        await running.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("change", ["value = '1'", "name = 'lost records'"])
def test_a_damaged_last_number_is_never_given_again(tmp_path: Path, change: str) -> None:
    """The numbers go on behind all that were given out."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        deleted = [save(store, tree, command, b"") for command in "abc"]
        store.records.forget([], deleted)
    damage_row(tmp_path, "meta", change, "name = 'last records'")
    with opened(tmp_path) as store:
        number = store.records.new_record_id()
        assert number > BLOCK // 2
        save(store, tree_of(store), "d", b"")
    with opened(tmp_path) as store:
        assert store.records.new_record_id() > number


@pytest.mark.parametrize("change", ["value = '4'", "name = 'scheme'"])
def test_a_damaged_version_is_refused(tmp_path: Path, change: str) -> None:
    """An upgrade from another version would change the tables."""
    with opened(tmp_path):
        pass
    damage_row(tmp_path, "meta", change, "name = 'schema'")
    with pytest.raises(StoreError, match=r"the row that says its schema .* is damaged: restore a backup"):
        Store(tmp_path / "forkpoint.sqlite")


def test_a_damaged_draft_deletes_nothing(tmp_path: Path) -> None:
    """The row of an import that was killed is damaged, and names the tree of a task."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        save(store, tree, "a", b"")
        draft = store.drafts.begin(1, 1)
    damage_row(tmp_path, "meta", f"name = 'draft {tree.id}'", f"name = 'draft {draft.tree}'")
    with opened(tmp_path) as store:
        assert store.trees.load(tree.id).size == 2
