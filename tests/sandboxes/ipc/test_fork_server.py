"""Fork servers: their start, their death, and their end."""

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.errors import SandboxError
from sandboxes.ipc.codec import IpcRequest, encode
from sandboxes.ipc.fork_server import ForkServer
from sandboxes.ipc.frames import IpcFrame
from sandboxes.ipc.launch_messages import CriuStarted, InspectNames
from sandboxes.ipc.state_messages import Pause, ProcessTree
from tests.machine import wait_until

CHILD = "tests.sandboxes.ipc.echo_child"
ASKED = Pause(root=False, checkpoint=False)


class StartsCriu(IpcRequest[CriuStarted], op="test_starts_criu"):
    """A request whose answer has a descriptor."""


def served(test: Callable[[ForkServer], Awaitable[None]], described: ForkServer | None = None) -> None:
    """Run a test with a fork server, which is that of the echo unless another one is described."""

    async def go() -> None:
        server = described or ForkServer("the echo", CHILD, hint="Try the next one.")
        await server.start()
        try:
            await test(server)
        finally:
            await server.close()

    asyncio.run(go())


def test_requests_are_answered_by_the_child() -> None:
    async def test(server: ForkServer) -> None:
        assert (await server.ask(ASKED)).message == ProcessTree(server.pid or 0)

    served(test)


def test_the_child_has_its_own_session() -> None:
    """What it forks must not have the niceness of the proxy's session."""

    async def test(server: ForkServer) -> None:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid

    served(test)


def test_an_error_response_is_raised() -> None:
    async def test(server: ForkServer) -> None:
        with pytest.raises(SandboxError, match="the echo: the kernel refused: EPERM"):
            await server.ask(InspectNames())

    served(test)


def test_an_answer_whose_descriptors_were_dropped_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops descriptors for which the receiving process has no room; the message itself comes."""

    async def test(server: ForkServer) -> None:
        async def request(*_: object, **__: object) -> IpcFrame:
            return IpcFrame(encode(CriuStarted()), b"", [])

        monkeypatch.setattr(server._channel, "request", request)
        with pytest.raises(SandboxError, match=r"0 descriptors came.*ulimit"):
            await server.ask(StartsCriu())

    served(test)


def test_a_failed_start_names_reason_and_hint() -> None:
    async def go() -> None:
        server = ForkServer("the echo", CHILD, ["fail"], hint="Try the next one.")
        with pytest.raises(SandboxError, match=r"the echo does not start: no luck\. Try the next one\."):
            await server.start()
        await server.close()

    asyncio.run(go())


def test_a_dead_child_is_replaced() -> None:
    """The death shows at the next request; `ensure_running` then starts another child."""

    async def test(server: ForkServer) -> None:
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the echo ended"):
            await server.ask(ASKED)
        assert server.has_died
        await server.ensure_running()
        answer = (await server.ask(ASKED)).message
        assert isinstance(answer, ProcessTree)
        assert answer.pid == server.pid != first

    served(test)


def test_death_shows_before_the_loop_has_read_it() -> None:
    """The end of what the child has forked may be read first. Whether to try again is decided then."""

    async def test(server: ForkServer) -> None:
        assert server.pid is not None
        assert not server.has_died
        process = os.pidfd_open(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        assert select.select([process], [], [], 10.0)[0]
        os.close(process)
        assert server.has_died

    served(test)


def test_closing_ends_the_child_and_refuses_requests() -> None:
    async def test(server: ForkServer) -> None:
        pid = server.pid
        await server.close()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the child runs on")
        with pytest.raises(SandboxError, match="not open"):
            await server.ask(ASKED)

    served(test)
