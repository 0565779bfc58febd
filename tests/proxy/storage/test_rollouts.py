"""Rollouts keep their steps and notes."""

from pathlib import Path

from proxy.storage.journal import JournalEntry
from tests.proxy.storage.rig import opened, save, tree_of


def test_protocols_keep_separate_notes_until_the_end(tmp_path: Path) -> None:
    """A protocol's note replaces its own earlier note only; all notes go when the rollout ends."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        first, other = (store.rollouts.create("task", name, tree.id, tree.root.id, name) for name in ("one", "other"))
        store.rollouts.put_note(first, "docker", '{"a":[1.5,null]}')
        store.rollouts.put_note(first, "e2b", '{"b":"\\u00e9"}')
        store.rollouts.put_note(first, "docker", '{"a":null}')
        store.rollouts.put_note(other, "e2b", "{}")
        assert store.rollouts.notes("task", "docker") == {"one": '{"a":null}'}
        assert store.rollouts.notes("task", "e2b") == {"one": '{"b":"\\u00e9"}', "other": "{}"}
        store.rollouts.finish(first)
        assert (store.rollouts.notes("task", "docker"), store.rollouts.notes("task", "e2b")) == ({}, {"other": "{}"})


def test_folding_a_step_twice_counts_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"")
        rollout = store.rollouts.create("task", "r", tree.id, tree.root.id, "token")
        steps = [JournalEntry(rollout, turn, record.id, 0) for turn in range(3)]
        store.rollouts.fold(steps)
        store.rollouts.fold(steps[1:])
        assert [turn for turn, _, _ in store.rollouts.steps(rollout)] == [0, 1, 2]
        assert store.rollouts.of_task("task")[0]["calls"] == 3
