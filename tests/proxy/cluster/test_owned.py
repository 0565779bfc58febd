"""A task that a member owns: what waits for lines that are written to its log, and what if the log fails."""

import asyncio

import pytest

from proxy.cluster.lines import encode
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.protocol import Ended, Steps


class Log:
    """A log whose rows are written one by one, when a test lets them."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.bodies: list[bytes] = []
        self.gate = asyncio.Semaphore(0)

    async def append(self, _task: str, row: int, body: bytes) -> bool:
        await self.gate.acquire()
        self.rows.append(row)
        self.bodies.append(body)
        return True

    def owned(self) -> Owned:
        return Owned("t", 1, Steps(), self.append, lambda owned, _reason: owned.drop())


def test_answers_wait_together_for_what_was_noted() -> None:
    """The output of a container and its exit code wait for the same line, in two responses."""

    async def go() -> None:
        log = Log()
        owned = log.owned()
        owned.note([Ended(7)])
        waiting = [asyncio.create_task(owned.settled()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(answer.done() for answer in waiting)
        log.gate.release()
        await asyncio.gather(*waiting)
        assert len(log.rows) == 1

    asyncio.run(go())


def test_what_is_put_goes_with_the_next_row() -> None:
    """A record is in the log with the first step by it, in one row, and before it."""

    async def go() -> None:
        log = Log()
        log.gate.release()
        owned = log.owned()
        owned.put([Ended(7)])
        for _ in range(10):
            await asyncio.sleep(0)
        assert log.rows == []
        await owned.write([Ended(8)])
        assert log.bodies == [encode([Ended(7), Ended(8)])]

    asyncio.run(go())


def test_lines_that_are_noted_meanwhile_hold_up_later_answers() -> None:
    async def go() -> None:
        log = Log()
        owned = log.owned()
        owned.note([Ended(7)])
        earlier = asyncio.create_task(owned.settled())
        await asyncio.sleep(0)
        owned.note([Ended(8)])
        log.gate.release()
        await earlier
        later = asyncio.create_task(owned.settled())
        for _ in range(10):
            await asyncio.sleep(0)
        assert (later.done(), len(log.rows)) == (False, 1)
        log.gate.release()
        await later
        assert len(log.rows) == 2

    asyncio.run(go())


def test_lines_are_answered_whatever_fails() -> None:
    """The log fails by a defect: calls that wait for their lines get an error, and the task is owned no more."""
    reasons = list[str]()

    async def append(_task: str, _row: int, _body: bytes) -> bool:
        raise RuntimeError("a defect")

    def failed(owned: Owned, reason: str) -> None:
        reasons.append(reason)
        owned.drop()

    async def run() -> None:
        owned = Owned("t", 1, Steps(), append, failed)
        written = [owned.write([Ended(number)]) for number in range(3)]
        async with asyncio.timeout(10):
            for each in written:
                with pytest.raises(DroppedError):
                    await each
        await owned.tasks.wait()

    asyncio.run(run())
    assert reasons == ["its log could not be written"]
