"""The executors of TVCACHE's client library get the answers that the tools give, and no sandbox is forgotten."""

import asyncio
import importlib
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandboxes.client.driver import ClientDriver
from tests.agents.tvclient_wire import GreedyExecutor, SemanticExecutor
from tests.proxy.serving import Running, serving

REAL = os.environ.get("FORKPOINT_TVCLIENT", "")


class Call:
    """A call of a tool that appends lines to a file and reads it. Read-only calls say so."""

    def __init__(self, name: str, line: str = "") -> None:
        self.name, self.line = name, line

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "line": self.line}

    @staticmethod
    def from_dict(data: dict[str, str]) -> "Call":
        return Call(**data)

    def will_mutate_state(self) -> bool:
        return self.name in ("append", "draw")


class Sandbox:
    """A sandbox of the client's own. `alive` has the lines of each."""

    alive: ClassVar[dict[str, list[str]]] = {}
    executed = 0
    numbers = itertools.count(1)

    def __init__(self, env_id: str | None = None, task_name: str = "") -> None:
        self._task, self._id = task_name, env_id or f"env{next(self.numbers)}"
        if env_id is None:
            self.alive[self._id] = []

    async def execute(self, call: Call) -> str:
        type(self).executed += 1
        lines = self.alive[self._id]
        if call.name == "draw":
            lines.append(f"key {Sandbox.executed}")
            return lines[-1]
        if call.name == "append":
            lines.append(call.line)
        return "/".join(lines)

    async def fork(self) -> "Sandbox":
        copy = Sandbox(task_name=self._task)
        copy.alive[copy._id] = [*self.alive[self._id]]
        return copy

    async def stop(self) -> None:
        self.alive.pop(self._id, None)

    def get_id(self) -> str:
        return self._id


class NoBank:
    """A fork bank that has prepared nothing."""

    def get_forked_env(self, task_name: str, parent_env_id: str) -> None: ...


def executor_of(kind: str) -> Any:
    if not REAL or kind == "greedy":
        return GreedyExecutor if kind == "greedy" else SemanticExecutor
    sys.path.insert(0, REAL)
    return importlib.import_module("tvclient.tools.async_semantic_stateful_executor").AsyncSemanticStatefulExecutor


async def rollout(proxy: Running, kind: str, calls: list[Call], path: str = "", task: str = "lines") -> list[str]:
    """Make calls as an agent loop does, each with the whole history; return the answers."""
    executor = executor_of(kind)(tool_call_env_class=Sandbox, tool_call_class=Call, task_id=task)
    executor.client.base_url = f"{str(proxy.client.base_url).rstrip('/')}/t/all/tvcache{path}"
    executor.set_fork_bank(NoBank())
    answers = [await executor.execute(calls[:length]) for length in range(1, len(calls) + 1)]
    await executor.close()
    return answers


def truth(calls: list[Call]) -> list[str]:
    lines: list[str] = []
    answers = []
    for call in calls:
        lines += [call.line] if call.name == "append" else []
        answers.append("/".join(lines))
    return answers


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("tvcache"), drivers={"client": ClientDriver()}) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_sandboxes() -> None:
    Sandbox.alive.clear()


def drawn_calls(draw: random.Random, reads: float) -> list[Call]:
    return [
        Call("read") if draw.random() < reads else Call("append", draw.choice("ab")) for _ in range(draw.randint(4, 9))
    ]


@pytest.mark.parametrize("kind", ["semantic", "greedy"])
@pytest.mark.parametrize("at_once", [1, 6])
def test_answers_equal_uncached_ones(proxy: Running, kind: str, at_once: int) -> None:
    """Rollouts that read and write at random are answered as if each had run alone; the authors' server fails here."""
    draw, task = random.Random(7), f"{kind}-{at_once}"  # noqa: S311 - a test's choices
    groups = [[drawn_calls(draw, 0.5) for _ in range(at_once)] for _ in range(12 // at_once)]

    async def run() -> None:
        for group in groups:
            answers = await asyncio.gather(*(rollout(proxy, kind, calls, task=task) for calls in group))
            assert answers == [truth(calls) for calls in group]

    before = Sandbox.executed
    asyncio.run(run())
    calls = sum(len(calls) for group in groups for calls in group)
    assert Sandbox.executed - before < calls
    held = proxy.client.get(f"/t/all/tvcache/whole/get_all_envs?task_name={task}").json()["env_ids"]
    # The library stops sandboxes in threads.
    deadline = time.monotonic() + 30
    while sorted(Sandbox.alive) != sorted(held):
        assert time.monotonic() < deadline, "a sandbox neither belongs to the tree nor is stopped"
        time.sleep(0.01)
    assert (kind == "greedy") == bool(held)


def test_group_is_all_hits(proxy: Running) -> None:
    """The second rollout executes nothing; the third executes what follows its fork, on a copy of the held sandbox."""
    same = [Call("append", "x"), Call("append", "y"), Call("read")]
    fork = [*same[:2], Call("append", "z")]
    asyncio.run(rollout(proxy, "semantic", same, "/whole", "group"))
    before = Sandbox.executed
    assert asyncio.run(rollout(proxy, "semantic", same, "/whole", "group")) == truth(same)
    assert Sandbox.executed == before
    assert asyncio.run(rollout(proxy, "semantic", fork, "/whole", "group")) == truth(fork)
    assert Sandbox.executed == before + 1
    row = proxy.client.get("/api/v1/tasks/group/report?by=task").json()["total"]
    assert (row["calls"], row["hits"], row["misses"]) == (9, 5, 4), "two look-ups of one answer count once"


def test_partial_match_needs_whole_chains(proxy: Running) -> None:
    """Where chains leave reads out, no prefix is offered: the library would run the first append twice."""
    asyncio.run(rollout(proxy, "semantic", [Call("read"), Call("append", "1")], task="reads"))
    calls = [Call("read"), Call("append", "1"), Call("append", "2"), Call("read")]
    assert asyncio.run(rollout(proxy, "semantic", calls, task="reads")) == truth(calls)


def test_calls_that_differ_are_shared_no_more(proxy: Running) -> None:
    """Two clients that drew different keys prove that the tool does not repeat itself: each runs it from then on."""
    calls = [Call("append", "a"), Call("draw"), Call("read")]

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(*(rollout(proxy, "greedy", calls, task="drawn") for _ in range(2))))

    asyncio.run(both())
    for answers in (asyncio.run(rollout(proxy, "greedy", calls, task="drawn")) for _ in range(3)):
        assert answers[2] == f"a/{answers[1]}", "an answer and the state that it shows are of one execution"


def test_tree_outlives_the_proxy(tmp_path: Path) -> None:
    """A proxy that starts on the same data answers what the last one recorded; sandboxes are not offered again."""
    calls = [Call("append", "kept"), Call("read")]
    for expected in (2, 0):
        before = Sandbox.executed
        with serving(tmp_path, drivers={"client": ClientDriver()}) as proxy:
            assert asyncio.run(rollout(proxy, "semantic", calls)) == truth(calls)
        assert Sandbox.executed - before == expected
    with serving(tmp_path, drivers={"client": ClientDriver()}) as proxy:
        rollouts = proxy.client.get("/api/v1/tasks/lines/rollouts").json()["items"]
        assert [each["finished"] for each in rollouts] == [True, True], (
            "the rollouts that count calls end with the proxy"
        )


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "get?task_name=t", None, 200),
        ("PUT", "put", {"task_name": "demo"}, 422),
        ("POST", "can_extend", {"task_name": "t"}, 501),
        ("POST", "unref", {"task_name": "t", "env_id": "unknown"}, 200),
        ("POST", "should_fork", {"task_name": "t", "history": ["a"]}, 200),
    ],
)
def test_requests_without_a_task_create_none(
    proxy: Running, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    """Whatever is looked up, only a report begins a task."""
    assert proxy.client.request(method, f"/t/all/tvcache/{path}", json=body).status_code == status
    assert proxy.client.get("/api/v1/tasks/t").status_code == 404


def test_tasks_of_the_proxy_are_refused(proxy: Running) -> None:
    """A client's report never gets into the tree of a task whose sandboxes are the proxy's."""
    proxy.exec("1", "echo hi", task="own").raise_for_status()
    assert proxy.client.get("/t/all/tvcache/get?task_name=own&tool_calls=a").status_code == 409


def test_test_results_belong_to_whole_histories(proxy: Running) -> None:
    """The result of one history is in no answer to another, and two different results of one history are in none."""
    url = "/t/all/tvcache"

    def store(history: list[str], result: str) -> bool:
        body = {"task_name": "tests", "history": history, "test_result": result}
        return bool(proxy.client.post(f"{url}/store_test_result", json=body).json()["success"])

    def result(*history: str) -> Any:
        params = {"task_name": "tests", "tool_calls": history}
        return proxy.client.get(f"{url}/get_test_result", params=params).json()["test_result"]

    assert store(["run", "edit", "run"], "PASS")
    assert (result("run"), result("run", "edit", "run"), result("run", "run")) == (None, "PASS", None)
    assert not store(["run", "edit", "run"], "FAIL")
    assert result("run", "edit", "run") is None


def test_tokens_see_their_own_tasks(tmp_path: Path) -> None:
    """The task that a request names is checked, and not only the one in its URL."""
    (tmp_path / "tokens").write_text("a-token-of-sixteen all mine-*\n")
    with serving(tmp_path / "data", drivers={"client": ClientDriver()}, token_file=tmp_path / "tokens") as proxy:
        proxy.client.headers["x-api-key"] = "a-token-of-sixteen"
        for task, status in (("mine-1", 200), ("theirs", 403)):
            assert proxy.client.get(f"/t/all/tvcache/get?task_name={task}").status_code == status
        del proxy.client.headers["x-api-key"]
        assert proxy.client.get("/t/all/tvcache/get?task_name=mine-1").status_code == 401
