"""The calls of a report: why each of them ran, which calls spoil themselves, and what helps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.rendering.report_page import page
from proxy.control.slow_calls import _why
from sandboxes.calls import Course, Execution, ToolCall
from sandboxes.listener import Listener
from tests.proxy.serving import Running, get, serving
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox

SECONDS = {"echo slow": 3.0, "echo private": 2.0}


class Spoiling(MemorySandbox):
    """A sandbox in which a call writes another number each time, or answers so; such results are not shared."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        command, number = str(call.arguments["command"]), self._driver.tick()
        if command == "$RANDOM > f":
            call = replace(call, arguments={**call.arguments, "command": f"echo {number} > f"})
        ran = await super().execute(call, listener)
        if command == "date":
            ran = replace(ran, result=replace(ran.result, body=ran.result.body + b" " * number))
        is_own = command in ("$RANDOM > f", "date", "echo private")
        return replace(ran, shareable=not is_own, seconds=SECONDS.get(command, ran.seconds))


class Numbered(MemorySandbox):
    """A sandbox in which each call begins after another pid, as beside live processes."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        ran = await super().execute(call, listener)
        return replace(ran, course=Course(None, 100 + self._driver.tick()))


CALLS = {
    "a": ("echo private", "$RANDOM > f", "cat f", "date", "echo slow"),
    "b": ("echo private", "$RANDOM > f", "cat f", "date", "echo slow"),
    "c": ("echo slow", "echo new"),
    "d": ("echo slow",),
}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    drivers = {"memory": MemoryDriver(sandbox=Spoiling)}
    with serving(tmp_path_factory.mktemp("data"), drivers=drivers) as running:
        for name, commands in CALLS.items():
            for command in commands:
                running.exec(name, command).raise_for_status()
        yield running


def test_calls_say_why_they_ran(proxy: Running) -> None:
    calls = get(proxy, "tasks/task/report")["calls"]
    told = {c["title"]: (c["reason"], c["executed"], c["saved"], c["states"], c["differing"]) for c in calls}
    assert told == {
        "echo slow": ("other-state", 3, 1, 3, 0),
        "echo private": ("private", 2, 0, 1, 0),
        "$RANDOM > f": ("differs", 2, 0, 1, 1),
        "cat f": ("other-state", 2, 0, 2, 0),
        # Each is in a state of its own, because the call before has spoilt it.
        "date": ("private", 2, 0, 2, 0),
        "echo new": ("new-call", 1, 0, 1, 0),
    }
    assert [c["title"] for c in calls][:2] == ["echo slow", "echo private"]
    assert (calls[0]["executed_s"], calls[0]["saved_s"]) == (9.0, 3.0)
    assert next(c["remedy"] for c in calls if c["title"] == "$RANDOM > f").startswith("Give the program a seed")


def test_answer_that_differs_spoils_too(proxy: Running) -> None:
    """Both executions are in one state, which the call leaves as it is."""
    for name in ("a", "b"):
        proxy.exec(name, "date", task="clock")
    [call] = get(proxy, "tasks/clock/report")["calls"]
    assert (call["reason"], call["states"], call["differing"]) == ("differs", 1, 1)
    assert call["remedy"] == "Set SOURCE_DATE_EPOCH, in the call or the task's `env`."


def test_labels_choose_the_calls(proxy: Running) -> None:
    assert get(proxy, "report?label=run=none")["calls"] == []
    assert {call["task"] for call in get(proxy, "report")["calls"]} >= {"task"}


def test_readers_see_reason_and_bound(proxy: Running) -> None:
    url = str(proxy.client.base_url)
    shown = CliRunner().invoke(app, ["report", "task", "--url", url], env={"COLUMNS": "200"}).output
    html = page([get(proxy, "tasks/task/report")])
    for text in ("other-state", "1 (1 differ)", "It would be 53.8% if each call ran once"):
        assert text in shown
        assert text in html


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("git commit -qm x", "GIT_AUTHOR_DATE"), ("python3 -m pytest -q", "PYTHONDONTWRITEBYTECODE"),
        ("mktemp -d", "seed"), ("tar czf a.tgz src", "SOURCE_DATE_EPOCH"), ("./run-it", "Find what differs"),
    ],
)  # fmt: skip
def test_mend_fits_the_call(text: str, mend: str) -> None:
    counts: dict[str, Any] = {"differing": 1, "states": 1}
    assert mend in _why(text, counts, quarantined=True, private=True)[1]


def test_equal_calls_are_one_whatever_their_replays_are_given(tmp_path: Path) -> None:
    with serving(tmp_path, drivers={"memory": MemoryDriver(sandbox=Numbered)}) as running:
        for name in ("a", "b"):
            # A long call is stored compressed.
            for command in (f"echo {name} > own", "echo fix > f", f"echo {'long ' * 1000} > g"):
                running.exec(name, command).raise_for_status()
            labels = f"/api/v1/tasks/task/rollouts/{name}/labels"
            running.client.patch(labels, json={"reward": float(name == "a")}).raise_for_status()
        count = "SELECT COUNT(DISTINCT call) FROM records"
        assert running.engine.store.database.read_apart(lambda reader: reader.execute(count).fetchone()) == (6,)
        view = get(running, "tasks/task/report")
        fixes = [c for c in view["calls"] if c["title"] == "echo fix > f"]
        assert [(c["executed"], c["states"], c["reason"]) for c in fixes] == [(2, 2, "other-state")]
        assert {arm["cache"]: arm["executed"] for arm in view["arms"]} == {"none": 6, "stateless": 4, "stateful": 6}
        winning = get(running, "tasks/task/compare")["winning_calls"]
        assert [each["call"] for each in winning] == ["echo a > own"]
