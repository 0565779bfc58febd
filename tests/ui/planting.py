"""Calls with answers of any kind, written straight into a store: what no tool of the tests would say."""

import asyncio
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from proxy.execution.root_state import tree_key
from proxy.storage.store import Store
from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.memory_driver import MemoryDriver


def plant_answers(data: Path, task: str, answers: Sequence[tuple[str, ToolResult]]) -> list[str]:
    """Write a task whose root has one child for each (command, answer); return the children's names."""
    spec = EnvironmentSpec(driver="memory")
    store = Store(data / "forkpoint.sqlite")
    store.tasks.put(task, spec.model_dump_json())
    tree = store.trees.open(task, asyncio.run(tree_key({"memory": MemoryDriver()}, spec, SourceRules())), spec)
    names = []
    for command, result in answers:
        node, number = Node(store.records.new_node_id()), store.records.new_record_id()
        key = CallKey(blake2b(number.to_bytes(8, "big"), digest_size=32).digest())
        record = Record(number, key, tree.root, node, Effect.FILES, 0.25, time.time())
        call = ToolCall("shell", "exec", {"command": command, "session": "main", "timeout_s": 10.0})
        store.records.save(tree.id, record, node, call, result)
        names.append(f"n{node.id}")
    store.close()
    return names
