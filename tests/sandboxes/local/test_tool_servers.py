"""Tool servers in sandboxes of the `local` driver, without a proxy: what becomes of the sandbox, and what is left."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import ServerError
from sandboxes.host.tool_calls import ALONG_BYTES
from sandboxes.server_spec import Server
from sandboxes.spec import EnvironmentSpec, Limits
from tests.machine import require_criu
from tests.sandboxes.box import in_sandbox, local_driver, opened, reads, run

PROGRAM = (Path(__file__).parents[2] / "agents" / "tool_server.py").read_text()
API = Server(command="exec python3 /srv.py 9000", port=9000)
SPEC: dict[str, Any] = {"files": {"/srv.py": PROGRAM}, "servers": {"api": API}}


async def ask(sandbox: Sandbox, method: str, target: str, body: bytes = b"", **more: Any) -> Execution:
    arguments = {"method": method, "target": target, "headers": [], **more}
    return await sandbox.execute(ToolCall("api", f"{method} {target}", arguments, body))


def test_first_call_starts_the_server(data_dir: Path) -> None:
    """The first call starts the server, which is part of its effect."""

    async def test(sandbox: Sandbox) -> None:
        assert (await ask(sandbox, "GET", "/echo")).effect is Effect.PROCESSES
        assert (await ask(sandbox, "GET", "/echo")).effect is Effect.NONE
        assert (await ask(sandbox, "POST", "/length")).effect is Effect.PROCESSES
        assert (await ask(sandbox, "GET", "/echo", effect="change")).effect is Effect.PROCESSES
        assert (await ask(sandbox, "POST", "/length", effect="read")).effect is Effect.NONE
        assert (await ask(sandbox, "GET", "/touch")).effect is Effect.FILES

    in_sandbox(data_dir, test, **SPEC)


@pytest.mark.parametrize("size", [0, 1, ALONG_BYTES - 200, ALONG_BYTES - 1, ALONG_BYTES, 1 << 17, 1 << 20])
def test_a_request_of_any_size_comes_whole(data_dir: Path, size: int) -> None:
    async def test(sandbox: Sandbox) -> None:
        for _ in range(3):
            answer = (await ask(sandbox, "POST", "/length", bytes(size))).result
            assert json.loads(answer.body)["length"] == size

    in_sandbox(data_dir, test, **SPEC)


def test_idle_server_adds_no_effect_to_commands(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        await ask(sandbox, "GET", "/echo")
        assert await reads(sandbox, "ls /srv.py")

    in_sandbox(data_dir, test, **SPEC)


@pytest.mark.parametrize("path", ["/die", "/half", "/garbage", "/silent"])
def test_failing_server_ends_its_sandbox(data_dir: Path, path: str) -> None:
    """A server that fails ends its sandbox."""

    async def test(sandbox: Sandbox) -> None:
        with pytest.raises(ServerError, match="api") as failed:
            await ask(sandbox, "GET", path)
        assert failed.value.silent == (path == "/silent")
        assert not sandbox.alive

    # The limit also holds for the answers that come, so only the silent server has a short one.
    server = API.model_copy(update={"timeout_s": 1.0}) if path == "/silent" else API
    in_sandbox(data_dir, test, **{**SPEC, "servers": {"api": server}})


def test_server_files_count_for_the_disk_limit(data_dir: Path) -> None:
    """Files that a server writes count for the disk limit of its sandbox."""
    hog = "exec python3 -c \"open('/root/big','wb').write(b'x' * (200 << 20)); import time; time.sleep(60)\""

    async def test(sandbox: Sandbox) -> None:
        with pytest.raises(ServerError):
            await ask(sandbox, "GET", "/")

    server = Server(command=hog, port=9000, ready_s=10)
    in_sandbox(data_dir, test, servers={"api": server}, limits=Limits(disk_mb=32))


def test_server_output_never_blocks_or_mixes(data_dir: Path) -> None:
    loud = 'yes "said by the server" & exec python3 /srv.py 9000'

    async def test(sandbox: Sandbox) -> None:
        assert (await ask(sandbox, "GET", "/echo")).result.status == 200
        answer = await run(sandbox, "echo mine; sleep .2")
        assert answer.out == "mine\n"
        assert (await ask(sandbox, "GET", "/echo")).result.status == 200

    in_sandbox(data_dir, test, **{**SPEC, "servers": {"api": API.model_copy(update={"command": loud})}})


def test_frozen_server_can_be_restored_repeatedly(data_dir: Path) -> None:
    """A frozen server can be restored any number of times, and continues each time."""
    require_criu()

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            spec = EnvironmentSpec(**SPEC)
            sandbox = await driver.start(spec)
            await ask(sandbox, "POST", "/put", b'{"x": "1"}')
            frozen = await sandbox.freeze()
            assert frozen.kind == "processes"
            await ask(sandbox, "POST", "/put", b'{"x": "2"}')
            for _ in range(2):
                other = await driver.restore(spec, frozen)
                assert b'"1"' in (await ask(other, "GET", "/get?key=x")).result.body
                assert (await ask(other, "POST", "/put", b"{}")).effect is Effect.PROCESSES
                again = await other.freeze()
                await other.close()
                third = await driver.restore(spec, again)
                assert b'"1"' in (await ask(third, "GET", "/get?key=x")).result.body
                await third.close()
            assert b'"2"' in (await ask(sandbox, "GET", "/get?key=x")).result.body

    asyncio.run(go())


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left_behind_by_calls(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        await ask(sandbox, "GET", "/echo")
        before = _open_files()
        for n in range(20):
            await ask(sandbox, "GET", f"/get?key={n}")
        assert _open_files() == before

    in_sandbox(data_dir, test, **SPEC)
