"""Tool servers in containers: reached in their network, checkpointed with their memory."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from sandboxes.calls import ToolCall
from sandboxes.driver import Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import ServerError
from sandboxes.server_spec import McpServer, Server
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.local.test_tool_servers import ask

PROGRAM = r"""
import json, os, socket, time
memory = {}
listener = socket.create_server(("127.0.0.1", 9000))
while True:
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as asked:
        method, target, _ = asked.readline().decode().split()
        length = 0
        while (line := asked.readline().strip()):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = asked.read(length)
        if target == "/die":
            os._exit(1)
        if target == "/silent":
            time.sleep(60)
        if target == "/touch":
            open("/root/touched", "a").write("x")
        if target == "/put":
            memory.update(json.loads(body))
        body = json.dumps(memory).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
"""
API = Server(command="exec python3 /srv.py 9000", port=9000)
ECHO = """
import json, sys
seen = []
for line in sys.stdin:
    asked = json.loads(line)
    seen.append(asked["method"])
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"seen": seen}}), flush=True)
"""


SOCKETS = (Path(__file__).parents[2] / "agents" / "socket_server.py").read_text()


def spec(**more: Any) -> EnvironmentSpec:
    payload = {"files": {"/srv.py": PROGRAM}, "servers": {"api": API}, **more}
    return EnvironmentSpec(**payload)


def driven(folder: Path, test: Callable[[OnImage], Awaitable[None]], *, checkpoints: bool = False) -> None:
    async def go() -> None:
        async with opened(OnImage(folder, checkpoints=checkpoints)) as driver:
            assert isinstance(driver, OnImage)
            await test(driver)

    asyncio.run(go())


def test_container_server_is_part_of_the_state(data_dir: Path) -> None:
    async def test(driver: OnImage) -> None:
        sandbox = await driver.start(spec())
        assert (await ask(sandbox, "GET", "/echo")).effect is Effect.PROCESSES
        assert (await ask(sandbox, "GET", "/echo")).effect is Effect.NONE
        put = await ask(sandbox, "POST", "/put", b'{"x": "1"}')
        assert (put.effect, put.result.body) == (Effect.PROCESSES, b'{"x": "1"}')
        assert (await ask(sandbox, "GET", "/touch")).effect is Effect.FILES
        assert (await run(sandbox, "cat /root/touched")).out == "x"

    driven(data_dir, test)


@pytest.mark.parametrize("path", ["/die", "/silent"])
def test_failing_server_ends_its_container(data_dir: Path, path: str) -> None:
    """A server that fails ends its container."""

    async def test(driver: OnImage) -> None:
        server = API.model_copy(update={"timeout_s": 1.0}) if path == "/silent" else API
        sandbox = await driver.start(spec(servers={"api": server}))
        with pytest.raises(ServerError, match="api"):
            await ask(sandbox, "GET", path)
        assert not sandbox.alive

    driven(data_dir, test)


def test_a_server_that_does_not_start_says_why(data_dir: Path) -> None:
    async def test(driver: OnImage) -> None:
        broken = Server(command="echo no such luck; exit 3", port=9000)
        sandbox = await driver.start(spec(servers={"api": broken}))
        with pytest.raises(ServerError, match="no such luck"):
            await ask(sandbox, "GET", "/")

    driven(data_dir, test)


async def hear(sandbox: Sandbox, method: str) -> list[str]:
    call = ToolCall("mcp", method, {"server": "echo", "method": method, "params": {}})
    return list(orjson.loads((await sandbox.execute(call)).result.body)["result"]["seen"])


def test_servers_are_restored_from_a_checkpoint(data_dir: Path) -> None:
    require_criu()

    async def test(driver: OnImage) -> None:
        both = spec(
            files={"/srv.py": PROGRAM, "/echo.py": ECHO},
            mcp_servers={"echo": McpServer(command="python3", args=("-u", "/echo.py"))},
        )
        sandbox = await driver.start(both)
        await ask(sandbox, "POST", "/put", b'{"x": "1"}')
        assert await hear(sandbox, "resources/list") == [
            "initialize", "notifications/initialized", "ping", "resources/list",
        ]  # fmt: skip
        frozen = await sandbox.freeze()
        assert frozen.kind == "processes"
        await ask(sandbox, "POST", "/put", b'{"x": "2"}')
        await hear(sandbox, "prompts/list")
        other = await driver.restore(both, frozen)
        assert b'"1"' in (await ask(other, "GET", "/get?key=x")).result.body
        assert (await hear(other, "resources/read"))[3:] == ["resources/list", "resources/read"]
        assert (await hear(sandbox, "resources/read"))[4:] == ["prompts/list", "resources/read"]

    driven(data_dir, test, checkpoints=True)


async def say(sandbox: Sandbox, text: str, *, first: bool = False) -> dict[str, Any]:
    arguments = {
        "method": "WS", "target": "/x", "headers": [], "connection": 0, "first": first, "binary": False,
        "subprotocols": [], "answers": 1,
    }  # fmt: skip
    answer = await sandbox.execute(ToolCall("api", "x", arguments, text.encode()))
    (message,) = orjson.loads(answer.result.body)["messages"]
    return dict(orjson.loads(message["text"]))


def test_websocket_server_is_restored_with_its_memory(data_dir: Path) -> None:
    require_criu()

    async def test(driver: OnImage) -> None:
        server = Server(command="exec python3 /ws.py 9000", port=9000)
        sockets = spec(files={"/ws.py": SOCKETS}, servers={"api": server})
        sandbox = await driver.start(sockets)
        drawn = (await say(sandbox, "draw", first=True))["drawn"]
        frozen = await sandbox.freeze()
        assert (await say(sandbox, "add one"))["said"] == [drawn, "one"]
        other = await driver.restore(sockets, frozen)
        assert (await say(other, "add two"))["said"] == [drawn, "two"]
        assert (await say(sandbox, "get"))["said"] == [drawn, "one"]

    driven(data_dir, test, checkpoints=True)
