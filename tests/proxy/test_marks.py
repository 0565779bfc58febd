"""Marks of calls: recorded once with the answer, and everybody who sees the call is told the same."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from forkpoint import Client
from proxy.cli.main import app
from proxy.control.tree_reader import Reader
from proxy.refusals import Problem
from proxy.storage.records import answer_of
from proxy.transfer.validate import _is_answer
from sandboxes.calls import MARKS, Execution, ToolCall, ToolResult, in_order
from sandboxes.errors import SandboxError
from sandboxes.listener import Listener
from tests.proxy.compat.docker.test_endpoint import container, execution, start
from tests.proxy.rig import engine
from tests.proxy.serving import Running, get, serving
from tests.proxy.transfer.rig import chunks, exported, walked
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox

COMMANDS = ("echo output memory > f", "cat f", "true")
FAILING = "echo machine"


class Marking(MemorySandbox):
    """A sandbox whose calls have the marks that their commands name; the machine fails for one command."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        ran = await super().execute(call, listener)
        command = str(call.arguments.get("command", " ".join(call.arguments.get("argv", ()))))
        if command == FAILING:
            raise SandboxError("the machine failed")
        # Large answers are stored compressed, and the marks are read from the first bytes all the same.
        body = ran.result.body + b" " * 5000 * ("memory" in command)
        return replace(ran, result=replace(ran.result, body=body).marked(*in_order(command.split())))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy with a rollout that missed and one that hit, started again in between."""
    data = tmp_path_factory.mktemp("data")
    for name in ("a", "b"):
        with serving(data, drivers={"memory": MemoryDriver(sandbox=Marking)}) as running:
            for command in (*COMMANDS, COMMANDS[0]):
                answer = running.exec(name, command)
                assert answer.headers["cache-status"].startswith("forkpoint; hit") == (name == "b")
            if name == "b":
                yield running


def test_hit_has_the_marks_of_the_miss(proxy: Running) -> None:
    for name, task in (("c", "task"), ("c", "other"), ("d", "other")):
        headers = [proxy.exec(name, command, task=task).headers.get("x-forkpoint-marks") for command in COMMANDS]
        assert headers == ["memory, output", None, None]


def test_dockers_view_of_an_exec_has_the_marks(tmp_path: Path) -> None:
    """The response to its start has gone out before the command ends."""
    with serving(tmp_path, drivers={"memory": MemoryDriver(sandbox=Marking)}, any_image=True) as running:
        for name in ("missed", "hit"):
            made = execution(running, name, container(running, name), "true disk pids")
            assert start(running, name, made)[0] == 101
            shown = running.client.get(f"/t/task/r/{name}/docker/exec/{made}/json")
            assert shown.headers["x-forkpoint-marks"] == "disk, pids"


def test_views_count_marks(proxy: Running) -> None:
    for name in ("a", "b"):
        view = get(proxy, f"tasks/task/rollouts/{name}?limit=2")
        assert [step["marks"] for step in view["steps"]["items"]] == [["memory", "output"], []]
        # Of all calls, and not of the page.
        assert view["marks"] == {"memory": 2, "output": 2}
    assert get(proxy, "tasks/task/rollouts/a?cursor=" + view["steps"]["next"])["steps"]["items"][-1]["marks"]


def test_trajectories_have_marks(proxy: Running, tmp_path: Path) -> None:
    line = json.loads(proxy.client.get("/api/v1/tasks/task/trajectories?rollout=b").text)
    assert [call["marks"] for call in line["calls"]] == [["memory", "output"], [], [], ["memory", "output"]]
    assert line["marks"] == {"memory": 2, "output": 2}
    with Client(str(proxy.client.base_url), trust_env=False) as client:
        client.save_trajectories(tmp_path / "t.parquet", task="task")
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    columns = {mark: rows[0][f"mark_{mark}"] for mark in MARKS}
    assert columns == dict.fromkeys(MARKS, 0) | {"memory": 2, "output": 2}


def test_client_and_command_tell_marks(proxy: Running) -> None:
    with Client(str(proxy.client.base_url), trust_env=False) as client:
        result = client.task("task").rollout("client").exec(COMMANDS[0])
        info = client.task("task").rollout("client").info()
        assert result.marks == ("memory", "output") == tuple(info.steps[0].marks) == tuple(info.marks)
    shown = CliRunner().invoke(app, ["rollout", "task", "b", "--url", str(proxy.client.base_url)])
    assert shown.exit_code == 0
    assert "memory, output" in shown.output


def test_failure_of_the_machine_is_marked(proxy: Running) -> None:
    """It is no answer and no step. A refused request is the agent's own."""
    failed = proxy.exec("failing", FAILING)
    assert (failed.status_code, failed.headers["x-forkpoint-marks"]) == (503, "machine")
    assert get(proxy, "tasks/task/rollouts/failing")["calls"] == 0
    assert "x-forkpoint-marks" not in proxy.exec("failing", "x", timeout_s="long").headers


@pytest.mark.parametrize("slug", ["state-lost", "overloaded", "quota"])
def test_some_refusals_are_the_machines(slug: str) -> None:
    assert bool(Problem(409, slug, "", "").marks) is (slug != "quota")


def test_lost_rollout_counts_as_the_machines(tmp_path: Path) -> None:
    async def story() -> None:
        async with engine(tmp_path, MemoryDriver(sandbox=Marking)) as ours:
            await walked(ours, "task", [["true"]])
            row = ours.store.rollouts.of_task("task")[0]
            reader = Reader(ours.store)
            assert reader.marks(row) == {}
            assert reader.marks({**row, "lost": "gone"}) == {"machine": 1}

    asyncio.run(story())


def test_marks_travel_with_exports(tmp_path: Path) -> None:
    async def story() -> None:
        async with engine(tmp_path / "a", MemoryDriver(sandbox=Marking)) as ours:
            await walked(ours, "task", [list(COMMANDS)])
            data = await exported(ours, "task")
        async with engine(tmp_path / "b", MemoryDriver(sandbox=Marking)) as theirs:
            await theirs.transfer.take("task", chunks(data))
            tree = (await theirs.tasks.open("task")).tree
            records = [record for node in tree.nodes.values() for record in node.records.values()]
            told: list[Any] = [theirs.store.records.result(record).marks for record in records]
            assert sorted(told) == [(), (), ("memory", "output")]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("head", "whole"),
    [
        ("200;memory,output text/plain", True), ("200 text/plain", True), ("200;output,memory text/plain", False),
        ("200; text/plain", False), ("200;nosuch text/plain", False), ("200;memory,memory text/plain", False),
    ],
)  # fmt: skip
def test_import_takes_known_marks_alone(head: str, *, whole: bool) -> None:
    assert _is_answer(f"{head}\nbody".encode()) is whole
    if whole:
        assert answer_of(f"{head}\nbody".encode()).status == 200


def test_marks_are_in_the_order_of_their_table() -> None:
    assert ToolResult(200, "", b"").marked("output", "timeout", "output").marks == ("timeout", "output")
    assert in_order(["nosuch", "machine", "broken"]) == ("broken", "machine")
