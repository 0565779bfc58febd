"""What a call used of the machine is recorded once, and everybody who sees the call is told the same."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forkpoint import Client
from proxy.cli.main import app
from sandboxes.calls import Execution, ToolCall
from sandboxes.listener import Listener
from tests.proxy.rig import engine
from tests.proxy.serving import Running, get, serving
from tests.proxy.transfer.rig import chunks, exported, walked
from tests.sandboxes.memory_driver import USED, MemoryDriver, MemorySandbox

SHOWN = USED._asdict()
HEADER = ", cpu;dur=250.000, memory;desc=8388608, read;desc=4096"
"""What `Server-Timing` says of `USED`, in which the written bytes are not known."""
COMMANDS = ("echo one > f", "cat f")


class Unknowing(MemorySandbox):
    """A sandbox that does not know what its calls use."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        return replace(await super().execute(call, listener), resources=None)


@pytest.fixture(params=[MemorySandbox, Unknowing], scope="module")
def knows(request: pytest.FixtureRequest) -> bool:
    return request.param is MemorySandbox


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, *, knows: bool) -> Iterator[Running]:
    """A proxy with a rollout that missed and one that hit, started again in between."""
    data = tmp_path_factory.mktemp("data")
    drivers = {"memory": MemoryDriver(sandbox=MemorySandbox if knows else Unknowing)}
    for name in ("a", "b"):
        with serving(data, drivers=drivers) as running:
            answers = [running.exec(name, command) for command in COMMANDS]
            outcomes = [answer.headers["cache-status"].startswith("forkpoint; hit") for answer in answers]
            assert outcomes == [name == "b"] * len(COMMANDS)
            if name == "b":
                yield running


def of_header(value: str) -> str:
    """Return what `Server-Timing` says behind the four times."""
    _, comma, rest = value.partition("wait;dur=")[2].partition(",")
    return comma + rest


def test_hit_tells_what_the_miss_has_told(proxy: Running, *, knows: bool) -> None:
    told = []
    for name, task in (("c", "task"), ("c", "other"), ("d", "other"), ("d", "task")):
        answer = proxy.exec(name, COMMANDS[0], task=task)
        told.append((answer.headers["cache-status"], of_header(answer.headers["server-timing"])))
    expected = HEADER if knows else ""
    assert [told_of for _, told_of in told] == [expected] * 4
    assert [status for status, _ in told] == ["forkpoint; hit", "forkpoint; fwd=miss; stored", *["forkpoint; hit"] * 2]


def test_views_show_what_was_recorded(proxy: Running, *, knows: bool) -> None:
    """Nodes, observations, steps, calls of the page, and trajectories, after a restart."""
    expected = SHOWN if knows else None
    steps = get(proxy, "tasks/task/rollouts/b")["steps"]["items"]
    node = steps[0]["node"]
    detail = get(proxy, f"tasks/task/nodes/{node}")
    call = get(proxy, f"tasks/task/nodes/{node}/calls/{steps[1]['record']}")
    root, *others = get(proxy, "tasks/task/tree")["nodes"]
    lines = proxy.client.get("/api/v1/tasks/task/trajectories").text.splitlines()
    shown = [
        *(step["resources"] for step in steps), detail["resources"], detail["observations"][0]["resources"],
        call["resources"], *(other["resources"] for other in others),
        *(each["resources"] for line in lines for each in json.loads(line)["calls"]),
    ]  # fmt: skip
    assert root["resources"] is None
    assert len(shown) >= 9
    assert shown == [expected] * len(shown)


def test_client_reads_what_the_header_says(proxy: Running, *, knows: bool) -> None:
    with Client(str(proxy.client.base_url), trust_env=False) as client:
        result = client.task("task").rollout("client").exec(COMMANDS[0])
        assert result.hit
        used = (result.cpu_s, result.peak_bytes, result.read_bytes, result.written_bytes)
        assert used == (USED if knows else (None,) * 4)
        assert client.task("task").node(result.node or "").resources == (SHOWN if knows else None)


def test_report_sums_what_calls_used(proxy: Running, *, knows: bool) -> None:
    """Sums are of what is known; what is known of nothing is null, and not 0."""
    view = get(proxy, "report?by=task&label=run=r7")
    assert (view["calls"], view["total"]["executed_cpu_s"], view["total"]["peak_bytes"]) == ([], None, None)
    labels = {"x-forkpoint-labels": "run=r8"}
    for name, commands in {"first": ("true", "echo r8 > f", "cat f"), "second": ("true", "cat f", "cat f")}.items():
        for command in commands:
            proxy.client.post(f"/t/costly/r/{name}/shell/exec", json={"command": command}, headers=labels)
    for view in (get(proxy, "report?by=run&label=run=r8"), get(proxy, "report?by=endpoint&label=run=r8")):
        total = view["total"]
        sums = [total["executed_cpu_s"], total["saved_cpu_s"], total["peak_bytes"]]
        calls = {call["title"]: (call["executed"], call["saved"], call["executed_cpu_s"]) for call in view["calls"]}
        if knows:
            assert sums == [pytest.approx(1.0), pytest.approx(0.5), USED.peak_bytes]
            assert calls == {"cat f": (2, 1, 0.5), "true": (1, 1, 0.25), "echo r8 > f": (1, 0, 0.25)}
        else:
            assert sums == [None] * 3
            assert {used for *_, used in calls.values()} == {None}


def test_commands_show_what_calls_used(proxy: Running, *, knows: bool) -> None:
    node = get(proxy, "tasks/task/rollouts/b")["steps"]["items"][0]["node"]
    url = ["--url", str(proxy.client.base_url)]
    shown = CliRunner().invoke(app, ["node", "task", node, *url], env={"COLUMNS": "200"})
    report = CliRunner().invoke(app, ["report", "task", *url], env={"COLUMNS": "200"})
    assert (shown.exit_code, report.exit_code) == (0, 0), shown.output + report.output
    assert ("cpu_s 0.25, peak_bytes 8.38861e+06, read_bytes 4096" in shown.output) is knows
    assert "slowest calls" in report.output
    assert ("saved CPU s" in report.output) is knows


def test_export_carries_what_calls_used(tmp_path: Path, *, knows: bool) -> None:
    """Without it a file has no such members, so that an earlier version reads the file too."""
    kind = MemorySandbox if knows else Unknowing

    async def story() -> None:
        async with engine(tmp_path / "a", MemoryDriver(sandbox=kind)) as ours:
            await walked(ours, "task", [list(COMMANDS)])
            data = await exported(ours, "task")
        assert (b"cpu_s" in data) is knows
        async with engine(tmp_path / "b", MemoryDriver(sandbox=kind)) as theirs:
            await theirs.transfer.take("task", chunks(data))
            tree = (await theirs.tasks.open("task")).tree
            records = [record for node in tree.nodes.values() for record in node.records.values()]
            used: list[Any] = [theirs.store.records.resources(record) for record in records]
            assert used == [USED if knows else None] * len(COMMANDS)

    asyncio.run(story())
