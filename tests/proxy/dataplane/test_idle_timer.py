"""The timer of an idle connection."""

import asyncio

from proxy.dataplane.idle_timer import IdleTimer


class Busy:
    """A connection that expires at the third look."""

    def __init__(self) -> None:
        self.looks, self.over = 0, asyncio.Event()

    def expire(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.over.set()
        return self.looks < 3


def test_connection_is_looked_at_until_it_expires() -> None:
    async def go() -> None:
        connection = Busy()
        timer = IdleTimer(connection.expire, 0.001, asyncio.get_running_loop())
        timer.restart()
        async with asyncio.timeout(30):
            await connection.over.wait()
        assert connection.looks == 3

    asyncio.run(go())


def test_cancelled_timer_looks_no_more() -> None:
    async def go() -> None:
        connection = Busy()
        timer = IdleTimer(connection.expire, 0, asyncio.get_running_loop())
        timer.restart()
        timer.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert connection.looks == 0

    asyncio.run(go())
