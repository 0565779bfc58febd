"""Conversations with tool servers that end in ways nobody foresaw."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandboxes.host.server_calls import ServerCalls


@pytest.mark.parametrize("error", [TypeError("of ours"), asyncio.CancelledError()], ids=repr)
def test_sandbox_that_was_left_in_a_call_is_dead(error: BaseException) -> None:
    """Its supervisor waits for the end of that call, so it would answer no other one."""
    deaths: list[str] = []

    async def go() -> None:
        calls = ServerCalls(cast("Any", SimpleNamespace(link=SimpleNamespace(die=deaths.append))))
        with pytest.raises(type(error)):
            async with calls.conversation("server"):
                raise error

    asyncio.run(go())
    assert deaths == [f"its call was cut off: {type(error).__name__}"]
