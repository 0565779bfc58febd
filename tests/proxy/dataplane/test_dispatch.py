"""The regular path: calls whose answer is the same in all states share no rollout's life."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from proxy.dataplane.addressing import Addressing
from proxy.dataplane.dispatch import Dispatch
from proxy.dialects.base import Call
from proxy.tree.keys import call_key
from tests.proxy.rig import engine, shell

if TYPE_CHECKING:
    from proxy.http.exchange import Exchange


class FakeExchange:
    """Takes an answer; `at_end` runs between the end of the call and the end of the request."""

    def __init__(self, at_end: Callable[[], Awaitable[None]] | None = None) -> None:
        self.at_end, self.answers = at_end, 0

    def listener(self, _call: Call) -> None:
        return None

    async def until(self, running: "asyncio.Future[Any]", _call: Call) -> Any:
        answer = await running
        if self.at_end is not None:
            await self.at_end()
        return answer

    async def passed(self) -> bool:
        return False

    async def answer(self, *_: Any) -> None:
        self.answers += 1


def test_first_constant_call_spares_the_second(tmp_path: Path) -> None:
    """A second caller finds the rollout of a constant call just before the first caller ends it."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            dispatch = Dispatch(running, Addressing(lambda: running.names, running.store.rollouts), {})
            call = Call(shell("pwd"), call_key(shell("pwd")), constant=True)
            second, calls = FakeExchange(), list[asyncio.Task[None]]()

            async def begin_second() -> None:
                calls.append(asyncio.ensure_future(dispatch._constant("task", call, cast("Exchange", second))))
                await asyncio.sleep(0)

            await dispatch._constant("task", call, cast("Exchange", FakeExchange(begin_second)))
            await calls[0]
            assert second.answers == 1
            assert running.tasks.rollouts.running == {}

    asyncio.run(body())
