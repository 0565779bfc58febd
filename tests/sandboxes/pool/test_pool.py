"""The pool: leases within a budget, whatever is cancelled and whatever fails."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.driver import Sandbox
from sandboxes.errors import SandboxError
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import OverloadedError, Pool
from sandboxes.pool.room import Room
from sandboxes.pool.roster import Slot
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import run
from tests.sandboxes.memory_driver import MemoryDriver

SPEC = EnvironmentSpec()


class Slow(MemoryDriver):
    """A memory driver whose sandboxes take a few turns of the loop to start and to close. most: lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.closing = asyncio.Event()
        self.closing.set()

    async def make(self) -> Sandbox:
        sandbox = await self.start(SPEC)
        self.most = max(self.most, len(self.live))
        for _ in range(3):
            await asyncio.sleep(0)
        close = sandbox.close

        async def close_late() -> None:
            await asyncio.sleep(0)
            await self.closing.wait()
            await close()

        sandbox.close = close_late  # type: ignore[method-assign]
        return sandbox


def pooled(test: Callable[[Pool, Slow], Awaitable[None]], *, budget: int = 2, patience_s: float = 60.0) -> None:
    async def go() -> None:
        driver = Slow()
        await test(Pool(Room(budget), patience_s=patience_s), driver)

    asyncio.run(go())


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=25))
def test_budget_limits_live_sandboxes(budget: int, uses: list[tuple[int, bool]]) -> None:
    """The budget limits the live sandboxes, and all callers are served in the end."""

    async def use(pool: Pool, driver: Slow, turns: int, close: bool) -> None:
        slot = await pool.start(driver.make, "n1", 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        if close:
            await pool.close(slot)
        else:
            await pool.release(slot)

    async def test(pool: Pool, driver: Slow) -> None:
        await asyncio.gather(*(use(pool, driver, turns, close) for turns, close in uses))
        pool.roster.check()
        assert driver.most <= budget
        await pool.close_where(lambda _: True)
        assert not driver.live

    pooled(test, budget=budget)


def test_longest_idle_sandbox_is_closed_for_room() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        first, second = [await pool.start(driver.make, "n1", owner) for owner in (1, 2)]
        await pool.release(second)
        await pool.release(first)
        first.used_at, second.used_at = 1.0, 2.0
        await pool.start(driver.make, "n1", 3)
        assert first.state is SandboxState.CLOSED
        assert second.state is SandboxState.IDLE

    pooled(test)


def test_wait_beyond_patience_is_overloaded() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        await pool.start(driver.make, "n1", 1)
        with pytest.raises(OverloadedError, match="all 1 sandboxes were busy"):
            await pool.start(driver.make, "n1", 2)
        assert len(pool.roster) == len(driver.live) == 1

    pooled(test, budget=1, patience_s=0.01)


@pytest.mark.parametrize("end", ["release", "close"])
def test_waiting_callers_are_served_after_release(end: str) -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        slot = await pool.start(driver.make, "n1", 1)
        waiting = [asyncio.ensure_future(pool.start(driver.make, "n1", owner)) for owner in (2, 3)]
        await settled()
        assert not any(start.done() for start in waiting)
        await getattr(pool, end)(slot)
        (served,), (late,) = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await pool.release(served.result())
        await late
        assert driver.most == 1

    pooled(test, budget=1)


def test_closing_sandbox_counts_in_budget() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        slot = await pool.start(driver.make, "n1", 1)
        driver.closing.clear()
        closing = asyncio.ensure_future(pool.close(slot))
        waiting = asyncio.ensure_future(pool.start(driver.make, "n1", 2))
        await settled()
        assert not waiting.done()
        driver.closing.set()
        await closing
        await waiting
        assert driver.most == 1

    pooled(test, budget=1)


def test_close_completes_when_caller_is_cancelled() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        slot = await pool.start(driver.make, "n1", 1)
        driver.closing.clear()
        closing = asyncio.ensure_future(pool.close(slot))
        await settled()
        closing.cancel()
        await settled()
        assert not closing.done(), "it waits for the sandbox to end"
        driver.closing.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not driver.live

    pooled(test)


def test_failed_or_cancelled_start_frees_its_slot() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        async def fail() -> Sandbox:
            raise SandboxError("the machine failed")

        async def hang() -> Sandbox:
            await asyncio.Event().wait()
            raise AssertionError

        with pytest.raises(SandboxError):
            await pool.start(fail, "n1", 1)
        hanging = asyncio.ensure_future(pool.start(hang, "n1", 1))
        await settled()
        hanging.cancel()
        await asyncio.wait([hanging])
        assert len(pool.roster) == 0
        await pool.start(driver.make, "n1", 1)

    pooled(test, budget=1)


def test_failed_close_frees_its_slot() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        async def fail() -> None:
            raise OSError("the machine failed")

        slot = await pool.start(driver.make, "n1", 1)
        assert slot.sandbox is not None
        slot.sandbox.close = fail  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(pool.start(driver.make, "n1", 2))
        await settled()
        with pytest.raises(OSError, match="the machine failed"):
            await pool.close(slot)
        await waiting

    pooled(test, budget=1)


def test_failed_freeze_closes_its_sandbox() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        slot = await pool.start(driver.make, "n1", 1)
        pool.begin_freeze(slot)
        with pytest.raises(SandboxError):
            async with pool.freezing(slot):
                raise SandboxError("the disk failed")
        assert slot.state is SandboxState.CLOSED
        assert not driver.live

    pooled(test)


def test_lease_of_freezing_sandbox_waits_and_fails() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        slot = await pool.start(driver.make, "n1", 1)
        pool.begin_freeze(slot)
        taking = asyncio.ensure_future(pool.lease(slot, "n1", 2))
        await settled()
        assert not taking.done()
        async with pool.freezing(slot):
            pass
        assert await taking is False
        assert await pool.lease(slot, "n1", 2) is True

    pooled(test)


async def gone(slot: Slot) -> None:
    assert slot.sandbox is not None
    await slot.sandbox.close()


def test_lease_fails_if_sandbox_died_or_moved() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        dead, away, leased = [await pool.start(driver.make, "n1", 1) for _ in range(3)]
        await pool.release(dead)
        await gone(dead)
        await pool.release(away)
        pool.roster.move(away, "n2")
        assert [await pool.lease(slot, "n1", 2) for slot in (dead, away, leased)] == [False] * 3

    pooled(test, budget=3)


def test_closing_spares_leased_sandboxes() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        busy, unused, fresh = [await pool.start(driver.make, "n1", 1) for _ in range(3)]
        await pool.release(unused)
        await pool.release(fresh)
        unused.used_at = -1e9
        unused_now = pool.roster.unused_since(time.monotonic() - 3600.0)
        assert await pool.close_where(unused_now.__contains__) == 1
        assert [slot.state for slot in (busy, unused, fresh)] == [
            SandboxState.LEASED,
            SandboxState.CLOSED,
            SandboxState.IDLE,
        ]
        assert fresh.sandbox is not None
        assert (await run(fresh.sandbox, "pwd")).out == "/root\n"

    pooled(test, budget=3)


def test_delayed_freeze_starts_when_sandbox_is_needed() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        for wants in (lambda slot: pool.lease(slot, "n1", 2), lambda _: pool.start(driver.make, "n1", 3)):
            slot = await pool.start(driver.make, "n1", 1)
            pool.begin_freeze(slot)
            frozen = asyncio.Event()

            async def freeze(slot: Slot = slot, frozen: asyncio.Event = frozen) -> None:
                async with pool.freezing(slot, after_s=60.0):
                    frozen.set()

            freezing = asyncio.ensure_future(freeze())
            await settled()
            assert not frozen.is_set()
            wanting = asyncio.ensure_future(wants(slot))
            async with asyncio.timeout(30):
                await asyncio.gather(freezing, wanting)
            await pool.close_where(lambda _: True)
            for left in pool.roster.slots:
                await pool.close(left)

    pooled(test, budget=1)


def test_warm_start_needs_two_free_slots() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        warm = await pool.start_warm(driver.make, "n1")
        assert warm.warm
        await pool.release(warm)
        await pool.start_warm(driver.make, "n1")
        with pytest.raises(OverloadedError):
            await pool.start_warm(driver.make, "n1")
        assert driver.most == 2
        assert await pool.lease(warm, "n1", 7)
        assert (warm.warm, warm.owner) == (False, 7)

    pooled(test, budget=3)


def test_close_victim_closes_one_idle_sandbox() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        busy, idle = [await pool.start(driver.make, "n1", 1) for _ in range(2)]
        await pool.release(idle)
        assert [await pool.close_victim() for _ in range(2)] == [True, False]
        assert busy.state is SandboxState.LEASED

    pooled(test, budget=2)


def test_a_sandbox_whose_state_cannot_be_kept_is_closed_last() -> None:
    requests: list[int | None] = []

    async def keep(slot: Slot) -> bool:
        requests.append(slot.owner)
        return slot.owner is not None

    async def test(_pool: Pool, driver: Slow) -> None:
        pool = Pool(Room(3), patience_s=5.0, keep=keep)
        # Nobody's would go first, and then the one whose rollout has just begun to think.
        slots = [await pool.start(driver.make, "n1", owner) for owner in (None, 2, 3)]
        for idle in slots:
            await pool.release(idle)
        closed = []
        for _ in slots:
            assert await pool.close_victim()
            closed += [slot.owner for slot in slots if slot.state is SandboxState.CLOSED and slot.owner not in closed]
        assert closed == [3, 2, None]
        assert requests == [None, 3, 2]

    pooled(test, budget=3)


def test_sandboxes_that_leave_before_their_rollouts_have_ended_are_counted() -> None:
    async def test(pool: Pool, driver: Slow) -> None:
        for owner in (None, 2, 3):
            await pool.release(await pool.start(driver.make, "n1", owner))
        assert await pool.close_victim()
        assert pool.newly_evicted() == 0
        await pool.release_owner(2)
        assert [await pool.close_victim() for _ in range(2)] == [True, True]
        assert (pool.evicted, pool.newly_evicted(), pool.newly_evicted()) == (1, 1, 0)

    pooled(test, budget=3)


def test_a_sandbox_that_is_taken_while_its_state_is_kept_stays() -> None:
    async def test(_pool: Pool, driver: Slow) -> None:
        async def keep(leaving: Slot) -> bool:
            return leaving is not slots[0] or await pool.lease(leaving, "n1", 1)

        pool = Pool(Room(2), patience_s=5.0, keep=keep)
        slots = [await pool.start(driver.make, "n1", owner) for owner in (None, 2)]
        for slot in slots:
            await pool.release(slot)
        assert await pool.close_victim()
        assert [slot.state for slot in slots] == [SandboxState.LEASED, SandboxState.CLOSED]

    pooled(test)
