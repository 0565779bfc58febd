"""A member of a cluster that hands its tasks over."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from proxy.cluster import member as member_module
from proxy.cluster.member import Member
from proxy.cluster.messages import DrainAnswer
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.protocol import Ended, Steps


def leaving(hands_over: Any = None) -> Member:
    """Return a member without calls, rollouts or a database."""
    member = Member.__new__(Member)
    member._engine, member.hands_over = cast("Any", SimpleNamespace(tasks={})), hands_over
    return member


def owned(task: str, append: Any) -> Owned:
    return Owned(task, 1, Steps(), append, lambda owned, _reason: owned.drop())


def test_a_drain_waits_for_a_slow_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks share the time for which states are sent. Each is handed over, unless a rollout loses its state."""
    monkeypatch.setattr(member_module, "SEND_S", 0.2)
    waited: list[float] = []

    async def send(_: object, within_s: float) -> bool:
        waited.append(within_s)
        await asyncio.sleep(within_s)
        return len(waited) != 2

    async def go() -> DrainAnswer:
        tasks = [owned(name, AsyncMock()) for name in "abcd"]
        return await leaving(send).hand_over(tasks, AsyncMock(return_value=True))

    assert asyncio.run(go()) == DrainAnswer(3, 1)
    assert (waited[0], len(waited), sum(waited) < 0.3) == (0.2, 4, True)


@pytest.mark.parametrize("is_taken", [True, False])
def test_no_row_comes_between_the_log_and_the_next_owner(*, is_taken: bool) -> None:
    """Misses of a task that is handed over wait. They are written if it stays, and made again elsewhere if not."""
    rows: list[int] = []

    async def append(_task: str, row: int, _body: bytes) -> bool:
        rows.append(row)
        return True

    async def go() -> None:
        task, line = owned("t", append), Ended(7)
        await task.write([line])
        waiting: list[asyncio.Future[None]] = []

        async def give(_task: str, view: int) -> bool:
            assert view == 1
            waiting.append(task.write([line]))
            # Whatever can run now, runs: the row would be sent in the first of these turns of the event loop.
            for _ in range(10):
                await asyncio.sleep(0)
            assert rows == [2]
            if is_taken:
                task.drop()
            return is_taken

        assert await leaving().hand_over([task], give) == DrainAnswer(int(is_taken), int(not is_taken))
        if is_taken:
            with pytest.raises(DroppedError):
                await waiting[0]
        else:
            await waiting[0]
        assert rows == ([2] if is_taken else [2, 3])

    asyncio.run(go())
