"""Records the examples of the OpenAPI description from a proxy: `python -m tests.proxy.control.record_examples`.

Time, chance and the machine are fixed where the proxy reads them, so each recording has the same bytes.
"""

import asyncio
import itertools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import orjson
import structlog

from proxy.cli import doctor
from proxy.control import api_description
from proxy.control.api_description import operations
from proxy.lifecycle import Lifecycle
from proxy.storage.database import StoreDatabase
from sandboxes.pool.room import Room, RoomBound
from snapshots.policy import Reuse
from tests.proxy.serving import Running, serving

_SHELL = {"command": "pytest -q"}
BODIES: dict[str, Any] = {
    "put_task": {"driver": "local", "setup": ["git init -q"]}, "warm_task": {"count": 8},
    "begin_rollout": {"rollout": "8", "labels": {"run": "r7", "step": 3}}, "fork_rollout": {"name": "variant"},
    "change_labels": {"reward": 1.0}, "pin_node": {"pinned": True}, "fork_at_node": {"name": "other"},
    "execute_at_node": {"command": "ls"}, "start_audit": {"sample": 100}, "put_masks": {"masks": ["dates"]},
    "make_image": {"name": "demo:fixed"},
    "execute": _SHELL, "execute_by_headers": _SHELL,
}  # fmt: skip
"""Bodies of requests, by operation."""
_SENT = {"put_task": {"driver": "memory", "setup": ["mkdir work"]}}
"""Bodies that are sent instead, because the recording proxy has only the in-memory driver."""
_QUERIES: dict[str, Any] = {
    "search_calls": {"q": "echo"},
    "get_titles": {"nodes": "2"},
    "get_timeline": {"span_s": 60, "step_s": 30},
}
_ORDER = {"get": 0, "put": 2, "post": 1, "patch": 1, "delete": 3}
_STARTED_AT = 1_772_442_000.0
"""2 March 2026, 09:00 UTC."""
_TICK_S = 2.0**-8
"""Seconds from one reading of `perf_counter` to the next, and so what most work takes. Sums of it are exact."""


class FixedMachine:
    """A machine on which time passes in `settle` only, chance repeats itself, and no background work runs."""

    def __init__(self) -> None:
        self._now, self._readings = _STARTED_AT, ContextVar("readings", default=0)
        self._numbers, self._loops = itertools.count(1), list[asyncio.AbstractEventLoop]()
        self._servers: set[asyncio.Task[Any]] = set()  # Tasks that run even when nothing happens.

    @contextmanager
    def under(self, data: Path) -> Iterator[None]:
        """Give the proxy's modules that are imported so far this machine during the block; `data` is its directory."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FORKPOINT_")}
        clock = {"time": lambda: self._now, "monotonic": lambda: self._now, "gmtime": lambda: time.gmtime(self._now)}
        times = SimpleNamespace(**vars(time) | clock | {"perf_counter": self._perf_counter})
        rooms = [room for name, room in sys.modules.items() if name.startswith(("proxy.", "snapshots.", "sandboxes."))]
        patches: tuple[AbstractContextManager[object], ...] = (
            *(patch.object(room, "time", times) for room in rooms if vars(room).get("time") is time),
            patch("os.urandom", self._chance), patch("secrets.token_bytes", self._chance),
            patch.dict("os.environ", variables, clear=True), patch("platform.release", lambda: "6.12.0"),
            patch("shutil.disk_usage", lambda _: SimpleNamespace(free=400 << 30)),
            patch.object(Room, "_bounds", lambda *_: [RoomBound(1365, "memory", "give it more memory")]),
            patch.object(StoreDatabase, "size_bytes", lambda _: 200_704),
            patch.object(Lifecycle, "start", lambda *_: self._loops.append(asyncio.get_running_loop())),
            patch("proxy.ui.system._doctor", lambda: _checks(data)),
        )  # fmt: skip
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield

    def _perf_counter(self) -> float:
        # Each task counts its own readings, in its context, so other tasks change no duration.
        self._readings.set(self._readings.get() + 1)
        return self._readings.get() * _TICK_S

    def _chance(self, size: int) -> bytes:
        return sha256(b"%d" % next(self._numbers)).digest()[:size]

    def settle(self, proxy: Running, *, seconds: int = 0) -> None:
        """Wait until the proxy has nothing left to do, then let time pass."""

        async def settled() -> None:
            this = {asyncio.current_task()}
            self._servers = self._servers or asyncio.all_tasks() - this
            while busy := asyncio.all_tasks() - this - self._servers:
                await asyncio.wait(busy)
            for _ in range(seconds):
                self._now += 1
                await proxy.control.activity.tick()

        asyncio.run_coroutine_threadsafe(settled(), self._loops[0]).result(30)


async def _checks(data: Path) -> list[dict[str, Any]]:
    """Return the checks of doctor whose results follow from `FixedMachine`."""
    checks = [doctor._kernel(), doctor._file_system(data), doctor._room(), doctor._no_checkpoints()]
    return [asdict(check) for check in checks]


def record() -> bytes:
    """Return examples of the JSON bodies of all operations, as JSON."""
    machine = FixedMachine()
    with tempfile.TemporaryDirectory() as folder, machine.under(Path(folder)), serving(Path(folder)) as proxy:
        proxy.client.headers["host"] = "127.0.0.1:8700"
        proxy.engine.snapshot_value.reuse = Reuse()  # Tests keep all snapshots; a proxy begins with this.
        schema = proxy.client.get("/openapi.json").json()
        machine.settle(proxy)
        for rollout in ("6", "7"):
            for command in ("mkdir src", "echo 'print(1)' > src/a.py", "cat src/a.py"):
                proxy.exec(rollout, command, task="demo").raise_for_status()
                machine.settle(proxy, seconds=1)
        # A minute in all, because the history has whole minutes.
        machine.settle(proxy, seconds=54)
        names = {"task": "demo", "rollout": "7", "node": "n3", "a": "n2", "b": "n3", "record": "2", "path": "a"}
        examples = {}
        for method, path, operation in sorted(operations(schema), key=lambda each: (_ORDER[each[0]], -len(each[1]))):
            if operation["operationId"] != "stream_events":
                root = {"path": "root"} if operation["operationId"] == "read_node_file" else {}
                examples[operation["operationId"]] = _example(proxy, method, path.format(**names | root), operation)
                machine.settle(proxy, seconds=operation["tags"] == ["shell"])
    shown = {name: example for name, example in sorted(examples.items()) if example}
    text = orjson.dumps(shown, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return text.replace(folder.encode(), b"/var/lib/forkpoint")


def _example(proxy: Running, method: str, path: str, operation: dict[str, Any]) -> dict[str, Any]:
    name = operation["operationId"]
    body = BODIES.get(name)
    headers = {"x-forkpoint-task": "demo", "x-forkpoint-rollout": "9"}
    if name == "import_task":
        tree = proxy.client.get("/api/v1/tasks/demo/export").content
        response = proxy.client.post("/api/v1/tasks/copy/import", content=tree)
    else:
        response = proxy.client.request(
            method, path, json=_SENT.get(name, body), params=_QUERIES.get(name), headers=headers, timeout=30
        )
    example = {} if body is None else {"request": body}
    if response.content and response.is_success and response.headers.get("content-type") == "application/json":
        # Sums of the same seconds differ by rounding: Python 3.12 adds more exactly than 3.11.
        example[str(response.status_code)] = response.json(parse_float=lambda number: round(float(number), 9))
    return example


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    to = Path(sys.argv[1]) if sys.argv[1:] else api_description._EXAMPLES
    to.write_bytes(record())
    print(f"written: {to}")
