"""Hits wait for whatever runs on the event loop, so no body of 1 MB may keep it for long, whatever the body is."""

import asyncio
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from proxy.dialects.builtin_tools import RECORDED
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.listener import Listener
from tests.proxy.serving import Running, serving
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox

SIZE = 1 << 20
HELD_S = 0.15
"""Most CPU time of one turn of the loop. The worst takes 0.05 s on an idle machine; what runs on the loop takes 0.4 s
and more."""


def filled(item: str, between: str = ",") -> str:
    return between.join([item] * (SIZE // len(item + between)))


VALUES = {
    "lists": f"[{filled('[]')}]",
    "objects": f"[{filled('{}')}]",
    "numbers": f"[{filled('0')}]",
    "long number": f"[{filled('0')},1234567890123456789]",
    "members": "{" + ",".join(f'"{n}":0' for n in range(SIZE // 10)) + "}",
    "deep": "[" * 1000 + "]" * 1000,
    "too deep": "[" * (SIZE // 2) + "]" * (SIZE // 2),
    "escapes": '"' + filled("\\u0001", "") + '"',
    "half pairs": '["\\ud800",' + filled("0") + "]",
    "words": f'"select {filled("a b", " ")}"',
}


@dataclass
class Loop:
    """The longest turn of an event loop, in CPU time of its thread: it does not count what other threads compute."""

    longest_s: float = 0.0
    beating: "asyncio.Task[None] | None" = None

    async def gate(self, _call: ToolCall) -> None:
        """Begin to measure at the first call, which runs on the loop."""
        self.beating = self.beating or asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        began = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_s, began = max(self.longest_s, now - began), now


class Answering(MemorySandbox):
    """Answers calls of every endpoint, without looking at them."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:  # noqa: ARG002
        if self._driver.gate is not None:
            await self._driver.gate(call)
        kind = RECORDED if call.endpoint == "mcp" else "application/json"
        return Execution(ToolResult(200, kind, b"{}"), Effect.NONE, 0.0, self._state.digest())


def rpc(method: str, params: str) -> str:
    return f'{{"jsonrpc": "2.0", "id": 1, "method": "{method}", "params": {params}}}'


# Each has a place for a value, so that the endpoint's own parser gets to it.
JSON = {
    "/t/shell/r/R/shell/exec": '{"command": %s}',
    "/t/sql/r/R/sql/query": '{"sql": %s}',
    "/t/sql/r/R/sql/explain": '{"sql": "select 1", "params": %s}',
    "/t/sql/r/R/sql/compare": '{"sql": "select 1", "gold": %s}',
    "/t/shell/r/R/mcp": rpc("tools/call", '{"name": "exec", "arguments": {"command": %s}}'),
    "/t/sql/r/R/mcp": rpc("tools/call", '{"name": "query", "arguments": {"sql": %s}}'),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Loop]]:
    folder, loop = tmp_path_factory.mktemp("large"), Loop()
    (source := folder / "outside" / "empty.db").parent.mkdir()
    source.touch()
    driver = MemoryDriver(loop.gate, Answering)
    specs = {
        "shell": {"driver": "local"},
        "sql": {"driver": "sqlite", "databases": {"main": {"source": str(source)}}},
    }
    # As the proxy does at its start: collections look at what is new since then.
    gc.collect()
    gc.freeze()
    with serving(folder / "data", drivers={"local": driver, "sqlite": driver}, sources=(str(source.parent),)) as proxy:
        for task, spec in specs.items():
            answer = proxy.client.put(f"/api/v1/tasks/{task}", json=spec)
            assert answer.is_success, answer.text
        proxy.client.post("/t/shell/r/first/shell/exec", json={"command": "true"})
        assert loop.beating is not None
        yield proxy, loop
    gc.unfreeze()


def held(running: tuple[Running, Loop], path: str, kind: str, body: bytes) -> float:
    """Return how long one turn of the loop took at most while a request was answered."""
    proxy, loop = running
    path = path.replace("/R/", f"/r{time.monotonic_ns()}/")
    loop.longest_s = 0.0
    answer = proxy.client.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code < 500, answer.text
    # The next request is answered after the turn that ended the last one.
    proxy.client.get("/healthz")
    return loop.longest_s


@pytest.mark.parametrize("path", list(JSON))
def test_large_json_leaves_the_loop_free(running: tuple[Running, Loop], path: str) -> None:
    """Deep, wide and escaped values of 1 MB are read while hits are answered."""
    longest = {
        name: held(running, path, "application/json", (JSON[path] % value).encode()) for name, value in VALUES.items()
    }
    assert max(longest.values()) < HELD_S, longest
