"""Audits: a tool that does not answer alike is found with the stated confidence, and its calls run again."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from proxy.audit.auditor import AuditProgress
from proxy.audit.confidence import clopper_pearson
from proxy.audit.noise_masks import Masks
from proxy.audit.sampling import reaches_outside
from proxy.engine import Engine
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.task import Task
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import ask, engine
from tests.proxy.serving import serving
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox

CALLS = 400
FLAKY = 20
"""One call in so many is nondeterministic."""


class FlakyDriver(MemoryDriver):
    """One whose commands with `flaky` in them are answered with a number that never comes again."""

    numbers = itertools.count(1_000_000)

    async def start(self, spec: EnvironmentSpec) -> MemorySandbox:
        return flaky(await super().start(spec))

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> MemorySandbox:
        return flaky(await super().restore(spec, frozen))


def flaky(sandbox: MemorySandbox) -> MemorySandbox:
    plain = sandbox.execute

    async def execute(call: ToolCall, listener: Listener | None = None) -> Execution:  # noqa: ARG001
        execution = await plain(call)
        if "flaky" not in str(call.arguments.get("command")):
            return execution
        body = orjson.loads(execution.result.body) | {"stdout": f"{next(FlakyDriver.numbers)}\n"}
        return replace(execution, result=ToolResult(200, "application/json", orjson.dumps(body)))

    sandbox.execute = execute  # type: ignore[method-assign]
    return sandbox


def command(number: int) -> str:
    """Every third call changes the session, the others look."""
    name = "flaky" if number % FLAKY == 7 else "plain"
    return f"X={name}{number}" if number % 3 == 0 else f"echo {name}{number}"


@asynccontextmanager
async def recorded(folder: Path, calls: int = CALLS, **settings: Any) -> AsyncIterator[tuple[Engine, Task]]:
    """Run an engine in which a rollout made so many calls, one in twenty of them nondeterministic."""
    async with engine(folder, FlakyDriver(), **settings) as running:
        task = await running.tasks.open("task")
        rollout = begin(running, task, "first")
        for number in range(calls):
            await ask(running, rollout, command(number))
        yield running, task


def begin(running: Engine, task: Task, name: str) -> Rollout:
    return running.tasks.rollouts.begin(task, name, task.tree, task.tree.root)


async def verified(running: Engine, task: Task, sample: int | None, seed: int = 0) -> AuditProgress:
    tally = running.audit.begin(task.name, task.tree, task.tree.root, sample, seed)
    while running.audit.running(task.tree) is not None:
        await asyncio.wait([running.audit._running[task.tree.id][0]])
    return tally


def test_an_audit_bounds_the_rate_of_differences(tmp_path: Path) -> None:
    """One call in twenty is nondeterministic; the interval of a sample contains this rate."""

    async def go() -> None:
        async with recorded(tmp_path) as (running, task):
            tally = await verified(running, task, sample=120)
            # 120 of 400 miss all 20 of them once in 2,500 times; the seed makes it always the same draw.
            assert (tally.checked, tally.unreachable, tally.failed) == (120, 0, 0)
            assert tally.differing > 0
            commands = [
                running.store.records.call_without_upload(call).arguments["command"]
                for _, _, _, call, *_ in running.store.audits.findings(task.tree.id)
            ]
            assert commands
            assert all("flaky" in text for text in commands)
            ((kind, checked, differing, unreachable, _),) = running.store.audits.totals(task.tree.id)
            assert (kind, checked, differing, unreachable) == ("records", 120, tally.differing, 0)
            interval = clopper_pearson(differing, checked)
            assert interval.low < 1 / FLAKY < interval.high
            assert (running.counts.audit_checked, running.counts.audit_differing) == (120, len(commands))

    asyncio.run(go())


def test_quarantined_calls_run_again_after_a_restart(tmp_path: Path) -> None:
    """A call that differs runs again for every rollout, before and after a restart."""

    async def answers(running: Engine, name: str) -> list[tuple[str, Outcome]]:
        task = await running.tasks.open("task")
        rollout = begin(running, task, name)
        responses = [await ask(running, rollout, command(number)) for number in range(40)]
        task.tree.check()
        return [(responses[number][0]["stdout"], responses[number][1]) for number in (7, 8, 27)]

    async def go() -> None:
        async with recorded(tmp_path, 40) as (running, task):
            before = await answers(running, "before")
            assert [outcome for _, outcome in before] == [Outcome.HIT] * 3
            assert (await verified(running, task, sample=None)).differing == 2
            seen = [await answers(running, f"after{n}") for n in range(2)]
        async with engine(tmp_path, FlakyDriver()) as again:
            seen.append(await answers(again, "restarted"))
        flaky_answers = {before[0][0], *(flaky_call[0] for flaky_call, *_ in seen)}
        assert len(flaky_answers) == 4, "each rollout gets an answer of its own"
        for flaky_call, plain_call, _ in seen:
            assert flaky_call[1] is Outcome.BYPASS
            assert plain_call[1] is Outcome.HIT, "other calls are answered as before"

    asyncio.run(go())


def test_without_quarantine_differing_calls_still_hit(tmp_path: Path) -> None:
    """The differing call is marked, and its record still answers."""

    async def go() -> None:
        async with recorded(tmp_path, 40, audit_quarantine=False) as (running, task):
            assert (await verified(running, task, sample=None)).differing == 2
            rollout = begin(running, task, "after")
            answers = [await ask(running, rollout, command(number)) for number in range(40)]
            assert {outcome for _, outcome in answers} == {Outcome.HIT}
            assert [bool(row[5]) for row in running.store.audits.findings(task.tree.id)] == [False, False]

    asyncio.run(go())


def test_an_audit_without_differences_changes_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            for name, commands in (("a", ["echo 1 > f", "cat f", "cd /tmp"]), ("b", ["echo 1 > f", "rm f", "ls"])):
                rollout = begin(running, task, name)
                for text in commands:
                    await ask(running, rollout, text)
            before = [(node.id, len(node.records), node.diverged) for node in task.tree.nodes.values()]
            tally = await verified(running, task, sample=None)
            assert (tally.checked, tally.differing, tally.unreachable) == (5, 0, 0)
            assert [(node.id, len(node.records), node.diverged) for node in task.tree.nodes.values()] == before
            assert len(running.pool.roster) <= 2, "its sandboxes are gone"

    asyncio.run(go())


def test_background_audits_wait_for_calls_in_flight(tmp_path: Path) -> None:
    """A sampled hit stays queued while a call is in flight, and is checked afterwards."""

    async def go() -> None:
        async with engine(tmp_path, warm_sandboxes=0) as running:
            task = await running.tasks.open("task")
            rollout = begin(running, task, "a")
            await ask(running, rollout, "echo 1 > f")
            running.audit._busy = lambda: 1
            running.audit._share = 1.0
            await ask(running, begin(running, task, "b"), "echo 1 > f")
            running.journal.fold()
            assert len(running.audit._queue) == 1, "the hit was drawn"
            await running.audit.work()
            assert len(running.audit._queue) == 1, "and is left while somebody waits"
            running.audit._busy = lambda: 0
            await running.audit.work()
            assert running.store.audits.totals(task.tree.id)[0][:3] == ("hits", 1, 0)

    asyncio.run(go())


def test_calls_below_a_divergence_are_checked_from_snapshots(tmp_path: Path) -> None:
    """A call that does not reproduce its state blocks the path from the root, but not the path from a snapshot
    below.
    """

    async def go() -> None:
        driver = MemoryDriver()
        async with engine(tmp_path, driver) as running:
            task = await running.tasks.open("task")
            rollout = begin(running, task, "a")
            for text in ("echo 1 > f", "echo 2 > f", "cat f", "echo 3 > f"):
                await ask(running, rollout, text)
            first = next(iter(task.tree.root.records.values()))
            first.reproducible = False
            await running.restorer.take_snapshot(task.tree, first.target)
            tally = await verified(running, task, sample=None)
            assert (tally.checked, tally.differing, tally.unreachable) == (4, 0, 0)
            running.cache.drop(first.target)
            for node in task.tree.nodes.values():
                running.cache.drop(node)
            tally = await verified(running, task, sample=None)
            assert (tally.checked, tally.unreachable) == (1, 3)

    asyncio.run(go())


def test_audits_run_over_http(tmp_path: Path) -> None:
    with serving(tmp_path) as proxy:
        node = proxy.exec("a", "echo 1 > f").headers["x-forkpoint-node"]
        proxy.exec("a", "cat f")
        masks = {"masks": ["dates"], "patterns": ["run-[0-9]+"]}
        shown = proxy.client.put("/api/v1/tasks/task/audit/masks", json=masks).json()
        assert (shown["masks"], shown["bounds"], shown["running"]) == (masks, [], None)
        response = proxy.client.post("/api/v1/tasks/task/verify", json={"sample": None, "node": node})
        # The call that led there, and the one that read there.
        assert (response.status_code, response.json()["of"]) == (202, 2)
        while (shown := proxy.client.get("/api/v1/tasks/task/audit").json())["running"] is not None:
            pass
        (bound,) = shown["bounds"]
        assert (bound["kind"], bound["checked"], bound["differing"], bound["low"]) == ("records", 2, 0, 0.0)
        assert 0.8 < bound["high"] < 1
        assert proxy.client.delete("/api/v1/tasks/task/verify").status_code == 204
        for wrong in ({"patterns": ["("]}, {"patterns": ["x*"]}, {"masks": ["nonsense"]}):
            assert proxy.client.put("/api/v1/tasks/task/audit/masks", json=wrong).status_code == 422
        assert proxy.client.post("/api/v1/tasks/task/verify", json={"node": "n999"}).status_code == 404


def test_masked_noise_is_no_difference(tmp_path: Path) -> None:
    """An audit with a mask for the changing number counts no difference."""

    async def go() -> None:
        async with recorded(tmp_path, 40) as (running, task):
            running.store.audits.put_masks("task", Masks(patterns=("1[0-9]{6}",)).model_dump_json())
            assert (await verified(running, task, sample=None)).differing == 0

    asyncio.run(go())


def test_an_audit_before_a_time_leaves_out_what_came_later(tmp_path: Path) -> None:
    async def go() -> None:
        async with recorded(tmp_path, calls=20) as (running, task):
            times = sorted(record.recorded_at for node in task.tree.nodes.values() for record in node.records.values())
            middle = times[len(times) // 2]
            tally = running.audit.begin(task.name, task.tree, task.tree.root, None, 0, middle)
            assert tally.of == sum(time < middle for time in times)
            await running.audit.stop(task.tree)

    asyncio.run(go())


def test_calls_to_servers_outside_are_not_repeated_in_the_background() -> None:
    assert reaches_outside(
        EnvironmentSpec.model_validate({"driver": "http", "servers": {"api": {"upstream": "http://127.0.0.1:1"}}})
    )
    assert not reaches_outside(EnvironmentSpec())
