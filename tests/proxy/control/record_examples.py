"""Records the examples of the OpenAPI description from a proxy: `python -m tests.proxy.control.record_examples`.

Time, chance and the machine are fixed where the proxy gets them, so each recording has the same bytes.
"""

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import orjson

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
    "list_children": {},
    "get_timeline": {"span_s": 60, "step_s": 30},
}
_ORDER = {"get": 0, "put": 2, "post": 1, "patch": 1, "delete": 3}
_ROOMS = ("proxy.", "snapshots.", "sandboxes.")
_STARTED_AT = 1_772_442_000.0
"""2 March 2026, 9 o'clock in UTC."""
_TICK_S = 2.0**-8
"""What all work takes: so far apart are two looks of a task at the clock. Sums of it are exact."""
_FORM = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class Still:
    """The surroundings of a proxy in this process, in which nothing happens by itself: time passes in `settle` only."""

    def __init__(self) -> None:
        self._now, self._looks = _STARTED_AT, ContextVar("looks", default=0)
        self._numbers, self._loops = itertools.count(1), list[asyncio.AbstractEventLoop]()
        self._servers: set[asyncio.Task[Any]] = set()

    @contextmanager
    def around(self, folder: Path) -> Iterator[None]:
        """Have what is imported so far of the proxy, and its data directory, in these surroundings during the block."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FORKPOINT_")}
        clock = {"time": lambda: self._now, "monotonic": lambda: self._now, "gmtime": lambda: time.gmtime(self._now)}
        times = SimpleNamespace(**vars(time) | clock | {"perf_counter": self._look})
        rooms = [module for name, module in sys.modules.items() if name.startswith(_ROOMS)]
        with ExitStack() as stack:
            for patched in (
                *(patch.object(room, "time", times) for room in rooms if vars(room).get("time") is time),
                patch("os.urandom", self._chance), patch("secrets.token_bytes", self._chance),
                patch.dict("os.environ", variables, clear=True), patch("platform.release", lambda: "6.12.0"),
                patch("shutil.disk_usage", lambda _: SimpleNamespace(free=400 << 30)),
                patch.object(Room, "_bounds", lambda *_: [RoomBound(1365, "memory", "give it more memory")]),
                patch.object(StoreDatabase, "size_bytes", lambda _: 200_704),
                patch.object(Lifecycle, "start", lambda *_: self._loops.append(asyncio.get_running_loop())),
                patch("proxy.ui.system._doctor", partial(_checked, folder)),
            ):  # fmt: skip
                stack.enter_context(patched)
            yield

    def _look(self) -> float:
        # A task has a context of its own, so what others do meanwhile changes no duration.
        self._looks.set(self._looks.get() + 1)
        return self._looks.get() * _TICK_S

    def _chance(self, size: int) -> bytes:
        return sha256(b"%d" % next(self._numbers)).digest()[:size]

    def settle(self, proxy: Running, *, seconds: int = 0) -> None:
        """Wait until the proxy only waits for requests; then let these seconds pass."""

        async def settled() -> None:
            this = {asyncio.current_task()}
            self._servers = self._servers or asyncio.all_tasks() - this
            while busy := asyncio.all_tasks() - this - self._servers:
                await asyncio.wait(busy)
            for _ in range(seconds):
                self._now += 1
                await proxy.control.activity.tick()

        asyncio.run_coroutine_threadsafe(settled(), self._loops[0]).result(30)


async def _checked(folder: Path) -> list[dict[str, Any]]:
    """Return those of doctor's checks that can be had of every machine."""
    checks = [doctor._kernel(), doctor._file_system(folder), doctor._room(), doctor._no_checkpoints()]
    return [asdict(check) for check in checks]


def record() -> bytes:
    """Return examples of the JSON bodies of all operations."""
    still = Still()
    with tempfile.TemporaryDirectory() as folder, still.around(Path(folder)), serving(Path(folder)) as proxy:
        proxy.client.headers["host"] = "127.0.0.1:8700"
        proxy.engine.snapshot_value.reuse = Reuse()
        schema = proxy.client.get("/openapi.json").json()
        still.settle(proxy)
        for rollout in ("6", "7"):
            for command in ("mkdir src", "echo 'print(1)' > src/a.py", "cat src/a.py"):
                proxy.exec(rollout, command, task="demo").raise_for_status()
                still.settle(proxy, seconds=1)
        still.settle(proxy, seconds=54)
        record_number = proxy.client.get("/api/v1/tasks/demo/rollouts/7").json()["steps"]["items"][1]["record"]
        names = {
            "task": "demo",
            "rollout": "7",
            "node": "n3",
            "a": "n2",
            "b": "n3",
            "record": record_number,
            "path": "a",
        }
        examples = {}
        for method, path, operation in sorted(operations(schema), key=lambda each: (_ORDER[each[0]], -len(each[1]))):
            if operation["operationId"] != "stream_events":
                root = {"path": "root"} if operation["operationId"] == "read_node_file" else {}
                examples[operation["operationId"]] = _example(proxy, method, path.format(**names | root), operation)
                still.settle(proxy)
    text = orjson.dumps({name: example for name, example in sorted(examples.items()) if example}, option=_FORM)
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
        example[str(response.status_code)] = response.json()
    return example


if __name__ == "__main__":
    (Path(sys.argv[1]) if sys.argv[1:] else api_description._EXAMPLES).write_bytes(record())
