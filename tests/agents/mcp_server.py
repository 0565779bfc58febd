"""A stock MCP server of the official SDK (1.x), whose memory is its state: over stdio, or over HTTP on port argv[1]."""

# mypy: disable-error-code="import-not-found, untyped-decorator"

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from mcp.server.fastmcp import Context, FastMCP
from mcp.types import SamplingMessage, TextContent, ToolAnnotations

server = FastMCP("memory")
memory: dict[str, str] = {}
READ = ToolAnnotations(readOnlyHint=True)


@server.tool()
def remember(key: str, value: str) -> str:
    """Keep a value."""
    memory[key] = value
    return f"{len(memory)} values"


@server.tool(annotations=READ)
def recall(key: str) -> str:
    """Return a value."""
    return memory[key]


@server.tool(annotations=READ)
def note(text: str) -> str:
    """Keep a text, whatever the hint says."""
    memory["noted"] = ", ".join(filter(None, (memory.get("noted"), text)))
    return str(memory["noted"].count(",") + 1)


@server.tool()
def draw() -> float:
    """Keep a random number."""
    number = random.random()  # noqa: S311
    memory["drawn"] = str(number)
    return number


@server.tool(annotations=READ)
def touch(path: str) -> str:
    """Write a file, whatever the hint says."""
    Path(path).write_text("touched\n")
    return "done"


@server.tool()
async def count(to: int, ctx: Context[Any, Any, Any]) -> str:
    """Count, and tell of it."""
    for n in range(to):
        await ctx.report_progress(n + 1, to, f"at {n + 1}")
    return f"counted to {to}"


@server.tool()
async def linger(seconds: float, ctx: Context[Any, Any, Any]) -> str:
    """Say that it began, and wait."""
    await ctx.info("began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        memory["lingered"] = "was cancelled"
        raise
    return "enough"


@server.tool()
async def think(ctx: Context[Any, Any, Any]) -> str:
    """Ask the client's model."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text="?"))
    try:
        return str(await ctx.session.create_message([message], max_tokens=5))
    except Exception as error:  # noqa: BLE001 - it is the answer
        return f"refused: {error}"


@server.resource("memory://all")
def everything() -> str:
    """Show all values."""
    return ", ".join(f"{key}={value}" for key, value in sorted(memory.items()))


@server.prompt()
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Say hello to {name}."


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.settings.port = int(sys.argv[1])
    server.run("streamable-http" if len(sys.argv) > 1 else "stdio")
