"""The database refuses foreign files unchanged, and never gives a number out twice."""

import sqlite3
from pathlib import Path

import pytest

from proxy.storage.errors import StoreError
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.schema import CHECKSUM_FUNCTION, row_checksum
from proxy.storage.store import Store
from proxy.tree.keys import CallKey
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect
from tests.proxy.storage.rig import opened, rows, save, tree_of


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """The error says what to do, and the file is unchanged."""
    path, content = tmp_path / "forkpoint.sqlite", b"not a database at all, but long enough to be one" * 100
    path.write_bytes(content)
    with pytest.raises(StoreError, match="cannot be used as Forkpoint's store"):
        Store(path)
    assert path.read_bytes() == content


def test_a_store_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """SQLite fails before it has read anything, as on a disk that fails; here it is a directory."""
    (tmp_path / "forkpoint.sqlite").mkdir()
    with pytest.raises(StoreError, match="unable to open"):
        Store(tmp_path / "forkpoint.sqlite")


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    """The error names both versions, and the file is unchanged."""
    with opened(tmp_path) as store:
        tree_of(store)
    path = tmp_path / "forkpoint.sqlite"
    connection = sqlite3.connect(path)
    connection.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
    with connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="schema 99, this Forkpoint reads"):
        Store(path)
    assert path.read_bytes() == before


def test_another_program_s_database_is_refused(tmp_path: Path) -> None:
    """The error names the tables, and the file is unchanged."""
    connection = sqlite3.connect(tmp_path / "forkpoint.sqlite")
    with connection:
        connection.execute("CREATE TABLE records (somebody TEXT)")
    connection.close()
    before = (tmp_path / "forkpoint.sqlite").read_bytes()
    with pytest.raises(StoreError, match="another program's database, with tables records"):
        Store(tmp_path / "forkpoint.sqlite")
    assert (tmp_path / "forkpoint.sqlite").read_bytes() == before


def test_a_recorded_call_writes_few_bytes(tmp_path: Path) -> None:
    """A commit writes each page that it changes whole, so a new file has small pages: 4 kB a call and not 19."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        log = tmp_path / "forkpoint.sqlite-wal"
        before = log.stat().st_size
        for number in range(100):
            save(store, tree, f"command {number}", b"an answer of its own" * 10)
        assert log.stat().st_size - before < 100 * 6000


def test_a_failed_transaction_writes_nothing(tmp_path: Path) -> None:
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


def test_numbers_are_never_given_out_twice(tmp_path: Path) -> None:
    """A record is deleted; after a restart its number is still taken, because steps may name it."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        record = save(store, tree, "a", b"")
        rollout = store.rollouts.create("task", "r", tree.id, tree.root.id, "token")
        store.rollouts.fold([JournalEntry(rollout, 0, record.id, 0)])
        store.records.forget([], [record])
    with opened(tmp_path) as again:
        assert again.records.new_record_id() > record.id, "or the rollout's history would show another call"
