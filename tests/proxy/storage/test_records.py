"""Calls and answers are stored once, compressed, and deleted with their last record."""

import asyncio
from base64 import b64encode
from hashlib import shake_128
from pathlib import Path
from typing import Any

import pytest

from proxy.storage.records import pack_large
from proxy.tree.keys import call_key
from proxy.tree.tree import Record
from sandboxes.calls import ResourceUse, ToolCall, ToolResult
from sandboxes.effects import Effect
from tests.proxy.storage.rig import opened, rows, save, tree_of

LARGE = shake_128(b"random").digest(300_000)


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


@pytest.mark.parametrize(("body", "is_packed"), [(LARGE.hex().encode(), 1), (b64encode(LARGE), 0), (LARGE, 0)])
def test_large_random_bytes_are_not_compressed_in_vain(tmp_path: Path, body: bytes, is_packed: int) -> None:
    with opened(tmp_path) as store:
        record = save(store, tree_of(store), "a", body)
        assert store.database.row("SELECT packed FROM blobs WHERE id = ?", (record.answer,)) == (is_packed,)
        assert store.records.result(record).body == body


def test_a_call_that_was_packed_ahead_is_stored_like_any_other(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        plain = save(store, tree, "a", b"answer" * 20_000, b"upload" * 20_000)
        call = ToolCall("shell", "exec", {"command": "b"}, b"upload" * 20_000)
        result = ToolResult(200, "text/plain", b"answer" * 20_000)
        packed = asyncio.run(pack_large(call, result))
        assert packed is not None
        record = Record(store.records.new_record_id(), call_key(call), tree.root, tree.root, Effect.NONE, 0.1, 1.0)
        used = ResourceUse(0.25, 4096, None, 0)
        written = store.records.save(tree.id, record, None, call, result, packed=packed, resources=used)
        assert written == (*map(store.blobs.read, (record.call, record.upload, record.answer)), used)
        assert (record.answer, record.upload) == (plain.answer, plain.upload)
        assert (store.records.call(record), store.records.result(record)) == (call, result)


def test_small_calls_are_packed_when_they_are_stored() -> None:
    call, result = ToolCall("shell", "exec", {}, b"x" * 100), ToolResult(200, "text/plain", b"y" * 60_000)
    assert asyncio.run(pack_large(call, result)) is None


def test_forgetting_keeps_blobs_in_use(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tree = tree_of(store)
        kept, gone = save(store, tree, "a", b"shared"), save(store, tree, "b", b"shared")
        store.records.forget([], [gone])
        asyncio.run(store.blobs.sweep())
        assert store.records.result(kept).body == b"shared"
        assert rows(store, "blobs") == 2


def test_a_sweep_spares_what_is_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with the answer of a deleted record is recorded while a thread looks for what nobody needs."""
    with opened(tmp_path) as store:
        tree = tree_of(store)
        gone = save(store, tree, "a", b"shared")
        store.records.forget([], [gone])
        look = store.database.read_apart

        async def go() -> Record:
            looked = asyncio.Event()

            async def to_thread(read: Any, *arguments: Any) -> Any:
                assert read == look
                found = read(*arguments)
                looked.set()
                await asyncio.sleep(0.05)
                return found

            monkeypatch.setattr(asyncio, "to_thread", to_thread)
            sweep = asyncio.ensure_future(store.blobs.sweep())
            await looked.wait()
            again = save(store, tree, "b", b"shared")
            await sweep
            return again

        again = asyncio.run(go())
        assert (again.answer, store.records.result(again).body) == (gone.answer, b"shared")
        assert rows(store, "blobs") == 2


def test_a_sweep_leaves_an_import_alone(tmp_path: Path) -> None:
    """The calls and answers of a tree are written before its records. A later sweep looks again."""
    with opened(tmp_path) as store:
        store.records.forget([], [save(store, tree_of(store), "a", b"x")])
        draft = store.drafts.begin(1, 1)
        asyncio.run(store.blobs.delete_unused())
        assert rows(store, "blobs") == 2
        store.drafts.drop(draft.tree)
    with opened(tmp_path) as store:
        asyncio.run(store.drafts.sweep())
        asyncio.run(store.blobs.sweep())
        assert rows(store, "blobs") == 0
        before = store.database.rows("SELECT name FROM meta", ())
        assert ("unswept",) not in before
