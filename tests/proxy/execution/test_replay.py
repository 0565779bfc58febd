"""States that replays reach in real sandboxes: the recorded state or none, with files in the recorded order."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from proxy.engine import Engine, build_engine
from proxy.execution.errors import StateLostError
from proxy.settings import Settings
from proxy.tree.rollout import Rollout
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from snapshots.policy import Reuse
from tests.machine import data_directory, require_sandboxes
from tests.proxy.rig import ask

NEVER_AGAIN = Reuse(0.0, 1e9)
"""States are never needed again, so none of them gets a snapshot."""


@pytest.fixture
def folder() -> Iterator[Path]:
    require_sandboxes()
    with data_directory() as made:
        yield made


def without_snapshots(folder: Path, test: Callable[[Engine], Awaitable[None]]) -> None:
    """Run a test on an engine that reaches every state by replay once its sandbox is gone."""

    async def body() -> None:
        spec = EnvironmentSpec(driver="local")
        settings = Settings(data=folder, default_spec=spec, warm_sandboxes=0, snapshot_bytes=1)
        engine = build_engine(settings, {"local": LocalDriver(folder / "local")})
        engine.snapshot_value.reuse = NEVER_AGAIN
        await engine.open()
        try:
            await test(engine)
        finally:
            await engine.aclose()

    asyncio.run(body())


async def out(engine: Engine, rollout: Rollout, command: str) -> str:
    text: str = (await ask(engine, rollout, command))[0]["stdout"]
    return text


async def lose(engine: Engine) -> None:
    """Remove every snapshot and close every sandbox, as damage of the disk does. Eviction spares such snapshots."""
    await engine.capture.drain()
    for snapshot in list(engine.snapshots):
        node = engine.trees.node(snapshot.tree, snapshot.node)
        if node is not None and node.origin is not None:
            engine.cache.drop(node)
    await engine.pool.close_where(lambda _: True)


@pytest.mark.parametrize(
    "large", ["head -c 70000000 /dev/zero > big", "mkdir d; cd d; seq 6000 | xargs touch; cd ..", ": > small"]
)
def test_another_state_is_never_served(folder: Path, large: str) -> None:
    """A large state with a random part is replayed: it is lost, and not swapped for what the replay gave."""

    async def test(engine: Engine) -> None:
        one, other = [await engine.tasks.rollout("task", name) for name in ("one", "other")]
        for rollout in (one, other):
            await out(engine, rollout, f"{large}; head -c 8 /dev/urandom | od -An -tx1 > id; echo made")
            await out(engine, rollout, "cat id")
        await lose(engine)
        for rollout in (one, other):
            with pytest.raises(StateLostError):
                await out(engine, rollout, "cat id; true")

    without_snapshots(folder, test)


WRITE = "python3 -c \"import time; [(open(n, 'w').write('x'), time.sleep(.006)) for n in {'a', 'b', 'c', 'd', 'e'}]\""
"""Writes five files, in the order of a set: it differs from run to run."""


@pytest.mark.parametrize("write", [WRITE, f"mkdir d; cd d; {WRITE}; cd ..; ln -s x l", f"{WRITE}; rm a; mv b f"])
def test_a_replay_restores_the_order_of_times(folder: Path, write: str) -> None:
    async def test(engine: Engine) -> None:
        rollout = await engine.tasks.rollout("task", "one")
        await out(engine, rollout, write)
        order = await out(engine, rollout, "ls -tA . d; touch later")
        for look in ("ls -tA . d | grep -v later; :", "ls -tA . d | grep -v later;"):
            await lose(engine)
            assert (await out(engine, rollout, look)) == order
        assert engine.counts.divergences == 0

    without_snapshots(folder, test)


def test_a_directorys_time_is_replayed(folder: Path) -> None:
    """The stamp directory of a makefile stays newer than the source that was built."""

    async def test(engine: Engine) -> None:
        rollout = await engine.tasks.rollout("task", "one")
        make = "[ out -nt src ] && echo current || { mkdir -p out; touch out; echo built; }"
        for command, answer in (
            ("touch src; sleep .1", ""),
            (make, "built\n"),
            (make, "current\n"),
            ("sleep .1; touch src", ""),
        ):
            assert await out(engine, rollout, command) == answer
        assert await out(engine, rollout, make) == "built\n"
        await lose(engine)
        assert await out(engine, rollout, f"{make};") == "current\n"

    without_snapshots(folder, test)
