"""Calls and answers are stored once, compressed, and deleted with their last record."""

from pathlib import Path

from tests.proxy.storage.rig import opened, rows, save, tree_of


def test_equal_blobs_are_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        first, second = (save(store, tree, command, b"same" * 1000, b"upload" * 1000) for command in ("a", "b"))
        assert (first.answer, first.upload) == (second.answer, second.upload)
        assert first.call != second.call
        assert rows(store, "blobs") == 4


def test_a_large_answer_is_compressed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"same" * 10_000)
        sizes = dict(store.database.rows("SELECT id, LENGTH(data) FROM blobs", ()))
        assert sizes[record.answer] < 1000
        assert store.records.result(record).body == b"same" * 10_000


def test_forgetting_keeps_blobs_in_use(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        kept, gone = save(store, tree, "a", b"shared"), save(store, tree, "b", b"shared")
        store.records.forget([], [gone])
        assert store.records.result(kept).body == b"shared"
        assert rows(store, "blobs") == 2
