"""Who starts a sandbox next."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sandboxes.pool.starts import Starts


class Clock:
    """A monotonic clock that tests set."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sandboxes.pool.starts.time", clock)
    return clock


class Scene:
    """One start at a time, and owners that wait for it. `began` has those that got their turn, in this order."""

    def __init__(self, callers: Callable[[int], int]) -> None:
        self.starts, self.began = Starts(1, callers), list[int | None]()
        self.over = asyncio.Event()
        self.tasks = dict[int | None, asyncio.Task[None]]()

    async def begin(self, owner: int | None) -> None:
        """Let an owner ask for its turn."""
        self.tasks[owner] = asyncio.create_task(self._start(owner))
        await asyncio.sleep(0)

    async def _start(self, owner: int | None) -> None:
        async with self.starts.turn(owner):
            self.began.append(owner)
            await self.over.wait()

    async def end(self) -> list[int | None]:
        """Let all starts end; return who got a turn, in this order."""
        self.over.set()
        async with asyncio.timeout(10.0):
            ended = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert all(error is None or isinstance(error, asyncio.CancelledError) for error in ended)
        return self.began


def run(callers: Callable[[int], int], test: Callable[[Scene], Awaitable[None]]) -> None:
    async def scene() -> None:
        await test(Scene(callers))

    asyncio.run(scene())


def test_start_with_most_waiting_callers_is_next(clock: Clock) -> None:
    async def test(scene: Scene) -> None:
        for owner in (1, 2, 8):
            await scene.begin(owner)
        clock.now = 1.0
        assert await scene.end() == [1, 8, 2]

    run(lambda owner: owner, test)


def test_long_wait_counts_more_than_many_callers(clock: Clock) -> None:
    async def test(scene: Scene) -> None:
        for owner in (1, 2):
            await scene.begin(owner)
        clock.now = 9.0
        await scene.begin(8)
        clock.now = 10.0
        # 2 callers have waited for 10 s, 8 callers for 1 s.
        assert await scene.end() == [1, 2, 8]

    run(lambda owner: owner, test)


def test_nobody_is_counted_less_than_one_caller(clock: Clock) -> None:
    async def test(scene: Scene) -> None:
        for owner in (1, None, 2):
            await scene.begin(owner)
            clock.now += 1.0
        assert await scene.end() == [1, None, 2]

    run(lambda _: 0, test)


def test_cancelled_caller_blocks_nobody(clock: Clock) -> None:
    async def test(scene: Scene) -> None:
        for owner in (1, 8, 2):
            await scene.begin(owner)
        clock.now = 1.0
        scene.over.set()
        # The first start ends after this, and before the task of the cancelled caller runs.
        scene.tasks[8].cancel()
        assert await scene.end() == [1, 2]
        assert not scene.starts.busy

    run(lambda owner: owner, test)


def test_turn_of_caller_cancelled_meanwhile_goes_on(clock: Clock) -> None:
    async def test(scene: Scene) -> None:
        async with scene.starts.turn(1):
            await scene.begin(8)
            await scene.begin(2)
            clock.now = 1.0
        # It has got the turn, and its task has not run yet.
        scene.tasks[8].cancel()
        assert await scene.end() == [2]
        assert not scene.starts.busy

    run(lambda owner: owner, test)


def test_failed_start_gives_its_turn_away() -> None:
    async def test(scene: Scene) -> None:
        await scene.begin(1)
        await scene.begin(2)
        scene.tasks[1].cancel()
        assert await scene.end() == [1, 2]
        assert not scene.starts.busy

    run(lambda owner: owner, test)
