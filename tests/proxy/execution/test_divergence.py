"""Calls that do not do the same when they run again: their states live by their snapshots, and are never mistaken."""

import asyncio
import contextlib
import itertools
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine import Engine
from proxy.execution.errors import StateLostError
from proxy.tree.rollout import Rollout
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import ask, engine
from tests.proxy.test_restart import abandon, open_engine
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox, _State


class RandomSandbox(MemorySandbox):
    """In its commands `random` is a number that never comes again."""

    numbers: Iterator[int] = itertools.count(1000)

    def _run(self, call: ToolCall) -> ToolResult:
        command = re.sub("random", lambda _: str(next(self.numbers)), call.arguments["command"])
        return super()._run(replace(call, arguments={**call.arguments, "command": command}))


class RandomDriver(MemoryDriver):
    def _adopt(self, spec: EnvironmentSpec, state: _State) -> MemorySandbox:
        sandbox = RandomSandbox(f"memory-{next(self._ids)}", spec, state, self)
        self.live[sandbox.id] = sandbox
        return sandbox


async def output(running: Engine, rollout: Rollout, command: str) -> str:
    text: str = (await ask(running, rollout, command))[0]["stdout"]
    return text


async def lose_sandboxes(running: Engine) -> None:
    await running.capture.drain()
    await running.pool.close_where(lambda _: True)


async def lose_all(running: Engine) -> None:
    """Lose every sandbox and every snapshot."""
    await lose_sandboxes(running)
    for snapshot in running.snapshots:
        node = running.trees.node(snapshot.tree, snapshot.node)
        assert node is not None
        running.cache.drop(node)


async def drawn(running: Engine, name: str = "first") -> tuple[Rollout, str]:
    """Return a rollout that wrote a random number into f, and what it read there."""
    rollout = await running.tasks.rollout("task", name)
    await ask(running, rollout, "echo random > f")
    return rollout, await output(running, rollout, "cat f")


def test_a_snapshot_keeps_an_unreproducible_state(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, driver := RandomDriver()) as running:
            first, number = await drawn(running)
            await lose_sandboxes(running)
            assert await output(running, first, "cat f; pwd") == f"{number}/root\n"
            second, same = await drawn(running, "second")
            await lose_sandboxes(running)
            assert same == number
            assert await output(running, second, "cat f; ls") == f"{number}f\nseed\n"
            assert driver.executed.count("echo random > f") == 1
            assert running.counts.divergences == 0

    asyncio.run(body())


class SeldomSandbox(RandomSandbox):
    """In its second run of a command with `random`, the number is another one than in all others."""

    numbers = itertools.chain([1, 2], itertools.repeat(1))


class SeldomDriver(MemoryDriver):
    def _adopt(self, spec: EnvironmentSpec, state: _State) -> MemorySandbox:
        sandbox = SeldomSandbox(f"memory-{next(self._ids)}", spec, state, self)
        self.live[sandbox.id] = sandbox
        return sandbox


def test_a_replay_that_misses_once_is_tried_again(tmp_path: Path) -> None:
    """A command that leaves another state in one run of many costs no rollout."""

    async def body() -> None:
        async with engine(tmp_path, driver := SeldomDriver()) as running:
            first, number = await drawn(running)
            await lose_all(running)
            assert await output(running, first, "cat f; pwd") == f"{number}/root\n"
            assert driver.executed.count("echo random > f") == 3
            assert running.counts.divergences == 0
            assert not first.node.diverged

    asyncio.run(body())


def test_a_lost_state_is_run_again_for_others(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver()) as running:
            first, number = await drawn(running)
            await lose_all(running)
            for _ in range(2):
                with pytest.raises(StateLostError, match="reaches another state, and no snapshot of it is left"):
                    await ask(running, first, "cat f; pwd")
            assert await output(running, first, "cat f") == number, "its answers stay true"
            second, other = await drawn(running, "second")
            assert other != number
            assert await output(running, second, "cat f; pwd") == f"{other}/root\n"
            third, same = await drawn(running, "third")
            assert same == other
            assert third.node is second.node is not first.node
            assert running.counts.divergences == 1
            first.tree.check()

    asyncio.run(body())


def test_a_lost_state_loses_its_descendants(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver()) as running:
            first, number = await drawn(running)
            await ask(running, first, "echo more >> f")
            assert await output(running, first, "cat f") == number + "more\n"
            await lose_all(running)
            with pytest.raises(StateLostError):
                await ask(running, first, "cat f; pwd")
            second, other = await drawn(running, "second")
            await ask(running, second, "echo more >> f")
            assert await output(running, second, "cat f") == other + "more\n"
            assert second.node is not first.node

    asyncio.run(body())


def test_an_owner_continues_in_a_state_set_aside(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver()) as running:
            first, number = await drawn(running)
            second, _ = await drawn(running, "second")
            await ask(running, second, "echo more >> f")
            await running.capture.drain()
            # The only sandbox is in the state after `more`; the state before exists nowhere else.
            for node in list(first.tree.nodes.values()):
                running.cache.drop(node)
            with pytest.raises(StateLostError):
                await ask(running, first, "cat f; pwd")
            assert second.node.diverged
            assert await output(running, second, "cat f; pwd") == f"{number}more\n/root\n"
            await ask(running, second, "echo end >> f")
            assert await output(running, second, "cat f") == f"{number}more\nend\n"
            third, other = await drawn(running, "third")
            assert other != number
            third.tree.check()

    asyncio.run(body())


def test_a_lost_state_stays_lost_after_restart(tmp_path: Path) -> None:
    async def body() -> None:
        running = await open_engine(tmp_path, RandomDriver())
        first, number = await drawn(running)
        await lose_all(running)
        with pytest.raises(StateLostError):
            await ask(running, first, "pwd")
        _, other = await drawn(running, "second")
        await abandon(running)
        async with engine(tmp_path, driver := RandomDriver()) as again:
            first = await again.tasks.rollout("task", "first")
            assert await output(again, first, "cat f") == number
            with pytest.raises(StateLostError):
                await ask(again, first, "pwd")
            third, same = await drawn(again, "third")
            assert same == other
            assert await output(again, third, "cat f; pwd") == f"{other}/root\n"
            assert driver.executed == ["cat f; pwd"]
            third.tree.check()

    asyncio.run(body())


def test_a_different_answer_alone_is_no_divergence(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver()) as running:
            rollout = await running.tasks.rollout("task", "first")
            first_output = await output(running, rollout, "echo kept > f; echo random")
            await lose_all(running)
            assert await output(running, rollout, "cat f; pwd") == "kept\n/root\n"
            assert running.counts.replayed_calls == 1
            assert running.counts.divergences == 0
            second = await running.tasks.rollout("task", "second")
            assert await output(running, second, "echo kept > f; echo random") == first_output

    asyncio.run(body())


def test_without_a_digest_answers_must_be_equal(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver()) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "sleep 9 &; echo random")
            await lose_all(running)
            with pytest.raises(StateLostError):
                await ask(running, rollout, "pwd")

    asyncio.run(body())


class NetworkedSandbox(MemorySandbox):
    """Its commands receive something from outside; the answers do not show it."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        return replace(await super().execute(call, listener), live=True)


def test_what_a_process_received_anew_is_no_replay(tmp_path: Path) -> None:
    """A process may hold other bytes than the recorded one, and nothing would show it. Files are compared."""

    async def body() -> None:
        async with engine(tmp_path, MemoryDriver(sandbox=NetworkedSandbox)) as running:
            rollout = await running.tasks.rollout("task", "files")
            await ask(running, rollout, "echo downloaded > f")
            await lose_all(running)
            assert await output(running, rollout, "cat f; pwd") == "downloaded\n/root\n"
            rollout = await running.tasks.rollout("task", "processes")
            await ask(running, rollout, "sleep 9 &")
            await lose_all(running)
            with pytest.raises(StateLostError):
                await ask(running, rollout, "pwd")

    asyncio.run(body())


def test_beside_processes_written_files_are_compared(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver()) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "sleep 9 &")
            await ask(running, rollout, "echo random > f")
            number = await output(running, rollout, "cat f")
            await lose_all(running)
            with contextlib.suppress(StateLostError):
                assert await output(running, rollout, "cat f; pwd") == f"{number}/root\n"

    asyncio.run(body())


def test_a_state_without_a_way_back_is_left_to_its_rollout(tmp_path: Path) -> None:
    """The state that a random call made is gone. Another rollout is not led there: it draws a number of its own."""

    async def body() -> None:
        async with engine(tmp_path, driver := RandomDriver()) as running:
            first, number = await drawn(running)
            middle = first.node
            await ask(running, first, "echo more >> f")
            await lose_sandboxes(running)
            running.cache.drop(middle)
            second, other = await drawn(running, "second")
            assert other != number
            assert await output(running, second, "cat f; pwd") == f"{other}\n/root\n".replace("\n\n", "\n")
            assert running.counts.hits_refused == {"not-kept": 1}
            driver.executed.clear()
            assert await output(running, first, "cat f; pwd") == f"{number}more\n/root\n"
            assert driver.executed == ["cat f; pwd"]

    asyncio.run(body())


# Whichever states are lost, and whenever: a rollout sees one history, in which random numbers keep their values.


COMMANDS = (
    "echo random > f", "echo random >> f", "cat f", "rm f", "echo fixed > f", "echo x > g", "cat g", "rm g", "X=random",
    "echo $X", "X=1", "echo $X > f", "ls", "sleep 9 &", "cat f; echo random",
)  # fmt: skip


@dataclass
class World:
    """The history that one rollout may see: a random number is a symbol until it is read, and fixed from then on."""

    f: list[str] | None = None
    g: bool = False
    x: str = ""
    draws: dict[str, str] = field(default_factory=dict)
    symbols: "itertools.count[int]" = field(default_factory=itertools.count)

    def draw(self) -> str:
        return f"?{next(self.symbols)}"

    def expects(self, seen: str, values: list[str]) -> bool:
        """Say whether seen shows these values, and remember what it tells about draws."""
        lines = seen.split("\n")[:-1]
        return len(lines) == len(values) and all(map(self._same, lines, values))

    def _same(self, line: str, value: str) -> bool:
        return line == (self.draws.setdefault(value, line) if value.startswith("?") else value)

    def see(self, command: str, seen: str) -> bool:  # noqa: C901 - a table of commands
        """Take a step, and say whether seen is what this world shows."""
        match command:
            case "echo random > f":
                self.f = [self.draw()]
            case "echo random >> f":
                self.f = [*(self.f or []), self.draw()]
            case "echo fixed > f":
                self.f = ["fixed"]
            case "echo $X > f":
                self.f = [self.x]
            case "rm f":
                self.f = None
            case "echo x > g" | "rm g":
                self.g = command == "echo x > g"
            case "X=random" | "X=1":
                self.x = "1" if command == "X=1" else self.draw()
            case "cat f":
                return self.expects(seen, self.f or [])
            case "cat g":
                return self.expects(seen, ["x"] if self.g else [])
            case "echo $X":
                return self.expects(seen, [self.x])
            case "cat f; echo random":
                return self.expects(seen, [*(self.f or []), self.draw()])
            case "ls":
                there = ["f"] * (self.f is not None) + ["g"] * self.g + ["seed"]
                return self.expects(seen, there)
        return not seen


async def live(running: Engine, name: str, trajectory: list[str], dice: random.Random) -> None:
    world = World()
    for command in trajectory:
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        if dice.random() < 0.2:
            await lose_sandboxes(running)
        for snapshot in running.snapshots:
            node = running.trees.node(snapshot.tree, snapshot.node)
            if node is not None and not snapshot.leases and dice.random() < 0.2:
                running.cache.drop(node)
        rollout = await running.tasks.rollout("task", name)
        try:
            answer, _ = await ask(running, rollout, command)
        except StateLostError:
            assert rollout.node.diverged
            return
        assert world.see(command, answer["stdout"]), (command, answer, world)


@settings(max_examples=150)
@given(st.lists(st.lists(st.sampled_from(COMMANDS), max_size=10), min_size=1, max_size=4), st.integers())
def test_a_rollout_sees_one_history_or_an_error(trajectories: list[list[str]], seed: int) -> None:
    async def body(data: Path) -> None:
        dice = random.Random(seed)  # noqa: S311 - dice of a test
        async with engine(data, RandomDriver()) as running:
            walks = [live(running, f"r{n}", trajectory, dice) for n, trajectory in enumerate(trajectories)]
            await asyncio.gather(*walks)
            (await running.tasks.open("task")).tree.check()

    with tempfile.TemporaryDirectory() as data:
        asyncio.run(body(Path(data)))
