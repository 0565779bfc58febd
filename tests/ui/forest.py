"""Trees as large as people have them, written straight into a store: running so many calls would take an hour."""

import asyncio
import random
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from proxy.execution.root_state import tree_key
from proxy.storage.records import insert_node
from proxy.storage.store import Store
from proxy.tree.keys import CallKey, canonical_json
from proxy.tree.tree import Node, Record
from sandboxes.effects import Effect
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.memory_driver import MemoryDriver

ROLLOUTS = 200
COMMANDS = (
    "pytest -q tests/test_{0}.py", "sed -i 's/{0}/{1}/' src/module_{1}.py", "git commit -am 'step {0}'",
    "make build-{0}", "pip install package-{0}", "mkdir -p out/{0} && cp src/{1}.py out/{0}", "patch -p1 < {0}.diff",
)  # fmt: skip


def plant(data: Path, task: str, nodes: int, *, chains: int = 5, chain: int = 2000, seed: int = 7) -> None:
    """Write a task on the in-memory driver whose tree has so many nodes: bushes of short ways, and some long chains."""
    spec = EnvironmentSpec(driver="memory")
    store = Store(data / "forkpoint.sqlite")
    store.tasks.put(task, spec.model_dump_json())
    tree = store.trees.open(task, asyncio.run(tree_key({"memory": MemoryDriver()}, spec, SourceRules())), spec)
    drawn = random.Random(seed)  # noqa: S311 - the same tree each time
    made = [tree.root]
    origins: dict[int, tuple[int, int]] = {}
    with store.database.transaction() as execute:
        answers = [_answer(store, execute, code) for code in (0, 0, 0, 1)]
        calls = [_call(store, execute, drawn) for _ in range(2000)]

        def add(source: Node) -> Node:
            node = Node(store.records.new_node_id())
            number = store.records.new_record_id()
            record = Record(
                number, CallKey(_digest(number)), source, node, Effect.FILES, drawn.expovariate(1), time.time()
            )
            record.call, record.answer = drawn.choice(calls), drawn.choices(answers, (60, 20, 15, 5))[0]
            insert_node(execute, tree.id, node)
            values = (
                number, tree.id, source.id, record.key, node.id, record.call, 0, record.answer, Effect.FILES.value,
                record.seconds, record.recorded_at, 0, 1, None, 0, 0, None, None, None, None,
            )  # fmt: skip
            execute(f"INSERT INTO records VALUES ({','.join('?' * len(values))})", values)
            made.append(node)
            origins[node.id] = number, source.id
            return node

        for _ in range(chains):
            here = tree.root
            for _ in range(chain):
                here = add(here)
        while len(made) < nodes:
            here = drawn.choice(made[-3000:] if drawn.random() < 0.8 else made)
            for _ in range(min(nodes - len(made), 1 + int(drawn.expovariate(0.25)))):
                here = add(here)
        _walk(store, execute, task, tree.id, tree.root.id, drawn, origins)
    store.close()


def _walk(
    store: Store,
    execute: Any,
    task: str,
    tree: int,
    root: int,
    drawn: random.Random,
    origins: dict[int, tuple[int, int]],
) -> None:
    """Let rollouts that have ended go some of the ways, so that there are hits."""
    ends = list(origins)
    for number in range(ROLLOUTS):
        node, steps = drawn.choice(ends), []
        while node != root:
            record, source = origins[node]
            steps.append(record)
            node = source
        rollout = store.database.take_number("rollouts")
        now, spent_s = time.time(), (0.0, 0.0, 0.0)
        walker = f"walker-{number}"
        values = (rollout, task, walker, tree, root, root, len(steps), 1, None, now, "", "{}", now, *spent_s)
        execute(f"INSERT INTO rollouts VALUES ({','.join('?' * len(values))})", values)
        for turn, record in enumerate(reversed(steps)):
            execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (rollout, turn, record, 0 if number else 1))


def _digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=32).digest()


def _call(store: Store, execute: Any, drawn: random.Random) -> int:
    command = drawn.choice(COMMANDS).format(drawn.randrange(1000), drawn.randrange(1000))
    arguments = {"command": command, "session": "main", "timeout_s": 120.0}
    return store.blobs.insert(execute, canonical_json({"endpoint": "shell", "tool": "exec", "arguments": arguments}))


def _answer(store: Store, execute: Any, code: int) -> int:
    payload = {"stdout": "x" * 300, "stderr": "", "exit_code": code, "timed_out": False, "truncated": False}
    return store.blobs.insert(execute, b"200 application/json\n" + orjson.dumps(payload))
