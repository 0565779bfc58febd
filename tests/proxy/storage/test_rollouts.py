"""Rollouts keep their steps and notes."""

from hashlib import sha256
from pathlib import Path

from proxy.storage.journal_segments import JournalEntry
from proxy.storage.rollouts import Overhead
from tests.proxy.storage.rig import opened, save, tree_of


def test_protocols_keep_separate_notes_until_the_end(tmp_path: Path) -> None:
    """A protocol's note replaces its own earlier note only; all notes go when the rollout ends."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        first, other = (store.rollouts.create("task", name, tree.id, tree.root.id, name) for name in ("one", "other"))
        store.notes.put(first, "docker", '{"a":[1.5,null]}')
        store.notes.put(first, "e2b", '{"b":"\\u00e9"}')
        store.notes.put(first, "docker", '{"a":null}')
        store.notes.put(other, "e2b", "{}")
        assert store.notes.of_task("task", "docker") == {"one": '{"a":null}'}
        assert store.notes.of_task("task", "e2b") == {"one": '{"b":"\\u00e9"}', "other": "{}"}
        store.rollouts.finish(first)
        assert (store.notes.of_task("task", "docker"), store.notes.of_task("task", "e2b")) == ({}, {"other": "{}"})


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


def test_overheads_are_summed_by_endpoint_and_go_with_their_task(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        rollout = store.rollouts.create("task", "r", tree.id, tree.root.id)
        for endpoint in ("shell", "sql", "shell"):
            store.rollouts.add_overhead(
                {(rollout, endpoint): Overhead(1.0, 2.0, 4.0), (10**9, endpoint): Overhead(1, 1, 1)}
            )
        by_endpoint = "SELECT endpoint, restore_s, replay_s, wait_s FROM overheads ORDER BY endpoint"
        assert store.database.rows(by_endpoint, ()) == [("shell", 2.0, 4.0, 8.0), ("sql", 1.0, 2.0, 4.0)]
        assert store.database.rows("SELECT restore_s, replay_s, wait_s FROM rollouts", ()) == [(3.0, 6.0, 12.0)]
        store.tasks.delete("task")
        assert store.database.rows(by_endpoint, ()) == []


def test_store_holds_no_token(tmp_path: Path) -> None:
    """Somebody who reads the store learns no token that the proxy accepts; the digest is no token either."""
    token = "fp_0123456789abcdefghijklmnopqrstuv"
    digest = sha256(token.encode()).hexdigest()
    with opened(tmp_path) as store:
        tree = tree_of(store)
        store.rollouts.create("task", "r", tree.id, tree.root.id, token)
        store.rollouts.create("task", "without", tree.id, tree.root.id)
        assert store.rollouts.by_token(token) == ("task", "r")
        assert [store.rollouts.by_token(wrong) for wrong in ("", digest, token[:-1], "None")] == [None] * 4
        assert "token" not in "".join(store.rollouts.of_task("task")[0])
    assert all(token.encode() not in path.read_bytes() for path in tmp_path.iterdir())
