"""A base that changes: new rollouts begin a new tree by themselves, and nobody shares a mixture of both."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path

import pytest

from proxy.engine import Engine
from proxy.execution import root_state
from proxy.execution.root_state import RootChangedError
from proxy.tree.rollout import Outcome
from sandboxes.calls import ToolCall
from sandboxes.errors import RootLostError, SpecError
from sandboxes.spec import EnvironmentSpec
from snapshots.policy import Reuse
from tests.proxy.rig import KEEPS_ALL, SPEC, ask, engine
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox

KEEPS_NONE = Reuse(0.0, 1e9)


class ChangingDriver(MemoryDriver):
    """A driver whose base is a text that all roots have in `/root/base`, and that a test changes."""

    def __init__(self) -> None:
        super().__init__(self._held)
        self.base = "old"
        self.before_call: Callable[[], object] = lambda: None
        self.looks = 0

    async def _held(self, _call: ToolCall) -> None:
        self.before_call()

    async def identity(self, spec: EnvironmentSpec) -> str:
        self.looks += 1
        if not self.base:
            raise SpecError("the base is gone")
        return f"{await super().identity(spec)} {self.base}"

    async def start(self, spec: EnvironmentSpec) -> MemorySandbox:
        # The driver checks the spec itself, which is no look of the proxy's.
        self.looks -= 1
        files = {**spec.files, "/root/base": self.base}
        return await super().start(spec.model_copy(update={"files": files}))


class WatchedDriver(ChangingDriver):
    """The same driver, which notices changes of the base by itself."""

    def unchanged(self, _spec: EnvironmentSpec) -> Hashable:
        return self.base or None


def run(act: Callable[[Engine, ChangingDriver], Awaitable[None]], data: Path, reuse: Reuse = KEEPS_ALL) -> None:
    async def go() -> None:
        driver = WatchedDriver()
        async with engine(data, driver, reuse=reuse) as running:
            await act(running, driver)

    asyncio.run(go())


async def says(running: Engine, name: str, command: str) -> tuple[str, Outcome]:
    """Let a rollout make a call; return its output and how it was obtained."""
    answer, outcome = await ask(running, await running.tasks.rollout("task", name), command)
    return answer["stdout"], outcome


@pytest.mark.parametrize("put", [True, False])
def test_new_rollouts_see_the_new_base(tmp_path: Path, put: bool) -> None:
    """The same call is executed again, also for a task that somebody PUT and for one that nobody ever did."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        if put:
            await running.tasks.put("task", SPEC)
        assert await says(running, "a", "cat base") == ("old", Outcome.MISS)
        driver.base = "new"
        assert await says(running, "b", "cat base") == ("new", Outcome.MISS)
        assert await says(running, "c", "cat base") == ("new", Outcome.HIT)
        driver.base = "old"
        assert await says(running, "d", "cat base") == ("old", Outcome.HIT)
        assert running.counts.root_changes == 2

    run(act, tmp_path)


def test_running_rollouts_go_on_alone(tmp_path: Path) -> None:
    """They have a sandbox or a snapshot. What they do now may be of both bases, so nobody else is given it."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        for name in ("a", "b"):
            await says(running, name, "X=1")
        driver.base = "new"
        assert await says(running, "a", "echo $X") == ("1\n", Outcome.BYPASS)
        assert await says(running, "b", "echo $X") == ("1\n", Outcome.BYPASS)
        assert await says(running, "c", "echo $X") == ("\n", Outcome.MISS)

    run(act, tmp_path)


def test_rollouts_without_a_way_are_told_so(tmp_path: Path) -> None:
    """Neither a sandbox nor a snapshot is left, and a replay would begin on the new base: that is an honest error."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        await says(running, "a", "X=1")
        await running.pool.close_where(lambda _slot: True)
        for snapshot in running.snapshots:
            node = running.trees.node(snapshot.tree, snapshot.node)
            assert node is not None
            running.cache.drop(node)
        driver.base = "new"
        with pytest.raises(RootChangedError, match="Start another rollout"):
            await says(running, "a", "echo $X")
        assert (await says(running, "b", "echo $X"))[1] is Outcome.MISS

    run(act, tmp_path, KEEPS_NONE)


def test_a_rollout_that_did_nothing_begins_anew(tmp_path: Path) -> None:
    """It was created before the change, and its first call comes after it."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        rollout, other = [await running.tasks.rollout("task", name) for name in "ab"]
        old = rollout.tree
        driver.base = "new"
        assert await says(running, "a", "cat base") == ("new", Outcome.MISS)
        assert await says(running, "b", "cat base") == ("new", Outcome.HIT)
        assert rollout.tree is not old
        assert running.walkers.of(rollout.tree.id) == {rollout, other}
        row = running.store.rollouts.of_task("task", name="a")[0]
        assert row["tree"] == rollout.tree.id
        assert row["start"] == rollout.tree.root.id

    run(act, tmp_path)


def test_a_change_during_a_call_is_not_shared(tmp_path: Path) -> None:
    """The call may have read both bases: its rollout gets the answer, and the next rollout runs it again."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        await says(running, "a", "true")

        def change() -> None:
            driver.base = "new"

        driver.before_call = change
        assert (await says(running, "a", "echo x > f"))[1] is Outcome.BYPASS
        driver.before_call = lambda: None
        tree = (await running.tasks.rollout("task", "a")).tree
        assert all(record.private for record in tree.root.records.values() if record.effect)
        assert (await says(running, "b", "cat base")) == ("new", Outcome.MISS)

    run(act, tmp_path)


def test_a_change_while_a_sandbox_starts_is_noticed(tmp_path: Path) -> None:
    """Between the look at the base and the mount another base may come: that sandbox is closed, and another starts."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        start = driver.start

        async def late(spec: EnvironmentSpec) -> MemorySandbox:
            if driver.base == "old":
                driver.base = "new"
                # What was mounted is a mixture.
                return await start(spec.model_copy(update={"files": {"/root/base": "mixture"}}))
            return await start(spec)

        driver.start = late  # type: ignore[method-assign]
        assert await says(running, "a", "cat base") == ("new", Outcome.MISS)
        assert [tree.root.records == {} for tree in running.trees] == [True, False]

    run(act, tmp_path)


def test_a_base_that_is_gone_leaves_hits(tmp_path: Path) -> None:
    """What is recorded is answered although nothing new can start; a miss says what is missing."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        await says(running, "a", "cat base")
        driver.base = ""
        assert await says(running, "b", "cat base") == ("old", Outcome.HIT)
        await running.pool.close_where(lambda _slot: True)
        with pytest.raises(SpecError, match="gone"):
            await says(running, "b", "pwd; true")

    run(act, tmp_path, KEEPS_NONE)


def test_unwatched_sources_are_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's name may lead to another image: rollouts that begin a second later see it, and no call looks."""
    monkeypatch.setattr(root_state, "_LOOKED_S", 0.0)

    async def go() -> None:
        driver = ChangingDriver()
        async with engine(tmp_path, driver) as running:
            await says(running, "a", "cat base")
            looks = driver.looks
            for number in range(5):
                await says(running, "a", f"X={number}")
            assert driver.looks == looks
            driver.base = "new"
            assert await says(running, "b", "cat base") == ("new", Outcome.MISS)

    asyncio.run(go())


def test_a_slow_look_holds_no_rollout_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database server copies a new source for minutes: rollouts begin with what is known until then."""
    monkeypatch.setattr(root_state, "_LOOKED_S", 0.0)
    monkeypatch.setattr(root_state, "_PATIENCE_S", 0.01)
    copied = asyncio.Event()

    class SlowDriver(ChangingDriver):
        async def identity(self, spec: EnvironmentSpec) -> str:
            if self.base == "new":
                await copied.wait()
            return await super().identity(spec)

    async def go() -> None:
        driver = SlowDriver()
        async with engine(tmp_path, driver) as running:
            await says(running, "a", "cat base")
            driver.base = "new"
            assert await says(running, "b", "cat base") == ("old", Outcome.HIT)
            assert await says(running, "c", "cat base") == ("old", Outcome.HIT)
            copied.set()
            await running.roots.background.wait()
            assert await says(running, "d", "cat base") == ("new", Outcome.MISS)

    asyncio.run(go())


def test_an_unchanged_base_costs_no_look(tmp_path: Path) -> None:
    """Rollouts begin and sandboxes start without a look at the base, however large it is."""

    async def act(running: Engine, driver: ChangingDriver) -> None:
        await says(running, "a", "X=1")
        looks = driver.looks
        for number in range(5):
            await says(running, f"b{number}", f"echo {number}")
        assert driver.looks == looks

    run(act, tmp_path, KEEPS_NONE)


class UnsteadySetup(MemoryDriver):
    """A driver whose set-up writes another text each time that it runs."""

    text = "first"

    async def start(self, spec: EnvironmentSpec) -> MemorySandbox:
        return await super().start(spec.model_copy(update={"files": {"/root/drawn": self.text}}))


def test_a_lost_root_state_is_not_replaced_by_another(tmp_path: Path) -> None:
    """A loss of power or damage took the root state, and set-up, run again, drew another one. No answer mixes both."""

    async def body() -> None:
        driver = UnsteadySetup()
        async with engine(tmp_path, driver) as running:
            await ask(running, await running.tasks.rollout("task", "first"), "cat /root/drawn; echo 1 > a")
        shutil.rmtree(tmp_path / "snapshots")
        driver.text = "second"
        async with engine(tmp_path, driver) as again:
            rollout = await again.tasks.rollout("task", "second")
            # The record of the call is there, but leads to a state that cannot be had again.
            for _ in range(2):
                with pytest.raises(RootLostError, match="gave another one than its tree was recorded on"):
                    await ask(again, rollout, "cat /root/drawn; echo 1 > a")
            assert not driver.live
            driver.text = "first"
            await ask(again, rollout, "cat /root/drawn; echo 1 > a")
            assert (await ask(again, rollout, "cat /root/drawn"))[0]["stdout"] == "first"

    asyncio.run(body())
