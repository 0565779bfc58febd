"""A store in a folder, with trees and records as the proxy writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.storage.store import Store
from proxy.tree.keys import call_key
from proxy.tree.tree import Record, Tree
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect
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


def rows(store: Store, table: str) -> int:
    return int(store.database.tables.table(table).count)


def save(store: Store, tree: Tree, command: str, answer: bytes, body: bytes = b"") -> Record:
    call = ToolCall("shell", "exec", {"command": command}, body)
    record = Record(store.records.new_record_id(), call_key(call), tree.root, tree.root, Effect.NONE, 0.1, 1.0)
    store.records.save(tree.id, record, None, call, ToolResult(200, "text/plain", answer))
    tree.add_record(record)
    return record
