"""One rollout of an MCP agent, with the official SDK (1.x or 2.x): argv is a target, a mode, and how the rollout parts.

The target is a URL, or the path of a server to run over stdio. Prints how many answers are shared, then all.
"""

# mypy: disable-error-code="import-not-found, unused-ignore"

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

import mcp

MODERN = hasattr(mcp, "Client")


async def connected(stack: AsyncExitStack, target: str, mode: str) -> Any:
    """Return a session with the server at target."""
    stdio = None
    if not target.startswith("http"):
        stdio = mcp.StdioServerParameters(command=sys.executable, args=[target], env=dict(os.environ))
    if MODERN:
        return await stack.enter_async_context(mcp.Client(stdio or target, mode=mode))
    if stdio:
        streams = await stack.enter_async_context(mcp.stdio_client(stdio))
    else:
        from mcp.client.streamable_http import streamablehttp_client  # noqa: PLC0415 - of 1.x alone

        streams = await stack.enter_async_context(streamablehttp_client(target))
    session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
    await session.initialize()
    return session


async def outcome(coming: Any) -> Any:
    """Return what is answered, or the error that the SDK raises for it."""
    try:
        answer = (await coming).model_dump(mode="json", by_alias=True, exclude_none=True)
    except Exception as error:  # noqa: BLE001 - it is an answer too
        return {"raised": str(error)}
    wire = ("_meta", "resultType", "ttlMs", "cacheScope")
    return {name: value for name, value in answer.items() if name not in wire}


async def main(target: str, mode: str, part: str) -> list[Any]:
    async with AsyncExitStack() as stack:
        session = await connected(stack, target, mode)
        progress: list[Any] = []

        async def heard(at: float, total: float | None, message: str | None) -> None:
            progress.append([at, total, message])

        def call(name: str, **arguments: Any) -> Any:
            return outcome(session.call_tool(name, arguments))

        tools = [tool.name for tool in (await session.list_tools()).tools]
        answers = [
            await call("remember", key="x", value="1"),
            await call("draw"),
            await call("recall", key="x"),
            await outcome(session.call_tool("count", {"to": 3}, progress_callback=heard)),
            await call("recall", key="no such"),
            await call("remember", key=1),
            await call("no such tool"),
            await outcome(session.read_resource("memory://all" if MODERN else _url("memory://all"))),
            await outcome(session.get_prompt("greet", {"name": "you"})),
        ]
        shared = len(answers)
        answers += [
            await call("remember", key="part", value=part),
            await call("recall", key="drawn"),
            await call("recall", key="x"),
            await call("remember", key="x", value=part),
            await call("recall", key="x"),
            await call("think"),
        ]
    return [shared, answers, progress, tools]


def _url(text: str) -> Any:
    from pydantic import AnyUrl  # noqa: PLC0415 - of 1.x alone

    return AnyUrl(text)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3]))))
