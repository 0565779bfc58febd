"""Reads that take long are shared, and none is older than the request that it answers."""

import asyncio

import pytest

from proxy.control.refreshed import SharedReads
from sandboxes.task_owner import start


class Source:
    """A number that grows; reading it takes until `let_go` is set."""

    def __init__(self) -> None:
        self.value, self.reads, self.let_go = 0, 0, asyncio.Event()
        self.fails: set[int] = set()  # The reads that fail, by number.

    async def read(self) -> int:
        self.reads += 1
        number, value = self.reads, self.value
        await self.let_go.wait()
        if number in self.fails:
            raise OSError("the disk is gone")
        return value


def test_callers_share_a_read_that_begins_after_they_came() -> None:
    async def body() -> None:
        source, shared = Source(), SharedReads[int]()
        first = start(shared.get("a", source.read))
        await asyncio.sleep(0.01)
        source.value = 1
        later = [start(shared.get("a", source.read)) for _ in range(20)]
        # One leaves, as a page does that is closed; the others get their answer.
        await asyncio.sleep(0.01)
        later.pop().cancel()
        source.let_go.set()
        assert await first == 0
        assert await asyncio.gather(*later) == [1] * 19
        assert source.reads == 2
        assert await shared.get("a", source.read) == 1
        assert source.reads == 3

    asyncio.run(body())


def test_other_keys_are_read_beside_it() -> None:
    async def body() -> None:
        source, shared = Source(), SharedReads[int]()
        both = [start(shared.get(key, source.read)) for key in "ab"]
        await asyncio.sleep(0.01)
        assert source.reads == 2
        source.let_go.set()
        assert await asyncio.gather(*both) == [0, 0]

    asyncio.run(body())


def test_an_error_is_that_of_its_callers_alone() -> None:
    async def body() -> None:
        source, shared = Source(), SharedReads[int]()
        source.fails = {1}
        first = start(shared.get("a", source.read))
        await asyncio.sleep(0.01)
        second = start(shared.get("a", source.read))
        source.let_go.set()
        with pytest.raises(OSError, match="the disk is gone"):
            await first
        assert await second == 0

    asyncio.run(body())
