"""What every driver promises, kept by one whose sandboxes are connections to a server elsewhere."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError, StateGoneError
from sandboxes.spec import EnvironmentSpec
from sandboxes.upstream.driver import HttpDriver
from tests.agents.elsewhere import Elsewhere, elsewhere
from tests.sandboxes.box import opened

Test = Callable[[HttpDriver, EnvironmentSpec, Elsewhere], Awaitable[None]]
BIND = ["session", "note"]


def driven(folder: Path, test: Test) -> None:
    async def go(there: Elsewhere) -> None:
        spec = EnvironmentSpec.model_validate({"driver": "http", "servers": {"api": {"upstream": there.url}}})
        async with opened(HttpDriver(folder)) as driver:
            assert isinstance(driver, HttpDriver)
            await test(driver, spec, there)

    with elsewhere() as there:
        asyncio.run(go(there))


async def ask(sandbox: Sandbox, path: str, body: dict[str, Any] | None = None, **more: Any) -> Execution:
    arguments = {"method": "POST", "target": path, "headers": [], "bind": BIND, "session": "within", **more}
    named = {"session": "forkpoint-rollout", **(body or {})}
    return await sandbox.execute(ToolCall("api", path, arguments, orjson.dumps(named)))


async def begun(sandbox: Sandbox) -> Sandbox:
    answer = await ask(sandbox, "/open", session="opens", names="body:session")
    assert orjson.loads(answer.result.body) == {"session": "forkpoint-rollout", "note": "as forkpoint-rollout"}
    assert (answer.effect, answer.state, answer.shareable) == (Effect.UNKNOWN, None, True)
    return sandbox


async def words(sandbox: Sandbox) -> list[str]:
    answer = await ask(sandbox, "/list", effect="read")
    assert answer.effect is Effect.NONE
    return list(orjson.loads(answer.result.body)["words"])


def test_sandboxes_have_separate_sessions(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        one, two = [await begun(await driver.start(spec)) for _ in range(2)]
        await asyncio.gather(ask(one, "/add", {"word": "1"}), ask(two, "/add", {"word": "2"}))
        assert [await words(one), await words(two)] == [["1"], ["2"]]

    driven(tmp_path, test)


def test_open_session_cannot_be_frozen(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        sandbox = await begun(await driver.start(spec))
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()
        await ask(sandbox, "/add", {"word": "1"})
        assert await words(sandbox) == ["1"]

    driven(tmp_path, test)


def test_state_without_sessions_is_restored(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        sandbox = await driver.start(spec)
        frozen = await sandbox.freeze()
        await ask(await begun(sandbox), "/add", {"word": "1"})
        restored = await begun(await driver.restore(spec, frozen))
        assert [await words(sandbox), await words(restored)] == [["1"], []]
        assert await driver.collect(frozen.parts) == 0
        with pytest.raises(StateGoneError):
            await driver.restore(spec, type(frozen)("http", "files", {}, 0, None))

    driven(tmp_path, test)


def test_stateless_call_keeps_the_root_state(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        sandbox = await driver.start(spec)
        answer = await ask(sandbox, "/search", stateless=True)
        assert (answer.effect, answer.shareable) == (Effect.NONE, True)
        assert answer.state == (await sandbox.freeze()).state

    driven(tmp_path, test)


def test_bytes_behind_a_response_answer_no_other_call(tmp_path: Path) -> None:
    """A server sends a second response behind its first. The next call, of another sandbox, does not get it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        poisoned = response(b"own") + response(b"POISONED") if not served else response(b"own")
        served.append(True)
        writer.write(poisoned)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.release()

    def response(body: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    served, ended = list[bool](), asyncio.Semaphore(0)

    async def go() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = EnvironmentSpec.model_validate(
            {"driver": "http", "servers": {"api": {"upstream": f"http://127.0.0.1:{port}"}}}
        )
        async with server, opened(HttpDriver(tmp_path)) as driver:
            bodies = [(await ask(await driver.start(spec), "/balance", stateless=True)).result.body for _ in range(2)]
            assert bodies == [b"own"] * 2
            for _ in bodies:
                await ended.acquire()

    asyncio.run(go())


def test_equal_specs_have_one_identity(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        assert await driver.identity(spec) == await driver.identity(spec.model_copy())

    driven(tmp_path, test)


def test_close_is_idempotent_and_closed_sandbox_raises(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        sandbox = await driver.start(spec)
        await sandbox.close()
        await sandbox.close()
        assert not sandbox.alive
        with pytest.raises(SandboxError):
            await ask(sandbox, "/search", stateless=True)

    driven(tmp_path, test)


def test_server_failure_kills_only_sandboxes_with_sessions(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, _: Elsewhere) -> None:
        without, within = await driver.start(spec), await begun(await driver.start(spec))
        for sandbox in (without, within):
            with pytest.raises(SandboxError):
                await ask(sandbox, "/fail", stateless=True)
        assert (without.alive, within.alive) == (True, False)

    driven(tmp_path, test)


def test_cancelled_call_kills_sandbox_with_session(tmp_path: Path) -> None:
    async def test(driver: HttpDriver, spec: EnvironmentSpec, there: Elsewhere) -> None:
        sandbox = await begun(await driver.start(spec))
        call = asyncio.create_task(ask(sandbox, "/silent"))
        assert await asyncio.to_thread(there.reached.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not sandbox.alive

    driven(tmp_path, test)
