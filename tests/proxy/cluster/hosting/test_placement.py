"""Which member runs a sandbox: one with room, on which the environment means the same, and that is not gone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proxy.cluster.hosting.remote_sandbox import RemoteSandbox
from sandboxes.driver import FrozenState
from sandboxes.errors import LeftRunningError, NotFreezableError, SandboxError
from sandboxes.pool.pool import NoRoomElsewhereError
from sandboxes.spec import EnvironmentSpec
from tests.proxy.cluster.hosting.pair import Pair
from tests.sandboxes.box import ran, run
from tests.sandboxes.memory_driver import MemoryDriver

SPEC = EnvironmentSpec(driver="memory")
Test = Callable[[Pair], Awaitable[None]]


def with_pair(folder: Path, test: Test, *, room: int = 2, host: MemoryDriver | None = None) -> None:
    async def go() -> None:
        pair = Pair(MemoryDriver(), host or MemoryDriver(), folder, room=room)
        await pair.open()
        try:
            async with asyncio.timeout(30):
                await test(pair)
        finally:
            await pair.aclose()

    asyncio.run(go())


async def root(pair: Pair) -> FrozenState:
    return await (await pair.owner.start(SPEC)).freeze()


async def placed(pair: Pair, frozen: FrozenState) -> RemoteSandbox:
    return await pair.placement.restore(SPEC, frozen)


def test_state_comes_home_and_goes_anywhere(tmp_path: Path) -> None:
    """What was frozen on the host is a state of the owner's driver."""

    async def test(pair: Pair) -> None:
        sandbox = await placed(pair, await root(pair))
        assert (await run(sandbox, "echo a > f; x=1")).code == 0
        frozen = await sandbox.freeze()
        await sandbox.close()
        assert not sandbox.alive
        here = await pair.owner.restore(SPEC, frozen)
        assert (await run(here, "cat f; echo $x")).out == "a\n1\n"
        assert (await run(await placed(pair, frozen), "cat f; echo $x")).out == "a\n1\n"

    with_pair(tmp_path, test)


def test_full_host_refuses_until_one_is_closed(tmp_path: Path) -> None:
    """The host keeps one place for its own next call. A sandbox that is closed makes room at once."""

    async def test(pair: Pair) -> None:
        frozen = await root(pair)
        first, _ = await placed(pair, frozen), await placed(pair, frozen)
        with pytest.raises(NoRoomElsewhereError):
            await placed(pair, frozen)
        await first.close()
        assert len(pair.pool.roster) == 1
        assert (await run(await placed(pair, frozen), "echo on")).out == "on\n"
        assert (pair.counts.placed, pair.counts.hosted, pair.counts.unplaced) == (3, 3, 1)

    with_pair(tmp_path, test)


def test_host_without_memory_takes_nothing(tmp_path: Path) -> None:
    async def test(pair: Pair) -> None:
        pair.has_memory = False
        with pytest.raises(NoRoomElsewhereError):
            await placed(pair, await root(pair))

    with_pair(tmp_path, test)


def test_environment_that_differs_is_not_used(tmp_path: Path) -> None:
    """The host says so once, and is not asked again for a while."""

    class Other(MemoryDriver):
        looks = 0

        async def identity(self, spec: EnvironmentSpec) -> str:
            self.looks += 1
            return await super().identity(spec) + " of another base"

    host = Other()

    async def test(pair: Pair) -> None:
        frozen = await root(pair)
        for _ in range(3):
            with pytest.raises(NoRoomElsewhereError):
                await placed(pair, frozen)
        assert host.looks == 1
        assert not host.live

    with_pair(tmp_path, test, host=host)


class EndlessCall:
    """A gate at which calls wait for ever; `began` says that one has come."""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def __call__(self, _call: object) -> None:
        self.began.set()
        await asyncio.Event().wait()


def test_cut_link_ends_both_ends(tmp_path: Path) -> None:
    """The owner's call fails and is not recorded; the host closes a sandbox that the owner cannot reach."""
    host, endless = MemoryDriver(), EndlessCall()

    async def test(pair: Pair) -> None:
        frozen = await root(pair)
        idle, busy = await placed(pair, frozen), await placed(pair, frozen)
        host.gate = endless
        call = asyncio.ensure_future(run(busy, "echo never"))
        await endless.began.wait()
        pair.cut()
        with pytest.raises(SandboxError, match="Try again"):
            await call
        assert not idle.alive
        with pytest.raises(SandboxError):
            await run(idle, "echo never")
        await pair.quiet()
        assert not host.live
        with pytest.raises(NoRoomElsewhereError):
            await placed(pair, frozen)

    with_pair(tmp_path, test, host=host)


def test_cancelled_call_closes_the_sandbox_at_its_host(tmp_path: Path) -> None:
    """As on one machine: nobody knows how far the call came."""
    host, endless = MemoryDriver(), EndlessCall()

    async def test(pair: Pair) -> None:
        sandbox = await placed(pair, await root(pair))
        host.gate = endless
        call = asyncio.ensure_future(run(sandbox, "echo never"))
        await endless.began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not sandbox.alive
        await pair.quiet()
        assert not host.live

    with_pair(tmp_path, test, host=host)


def test_dead_sandbox_says_why(tmp_path: Path) -> None:
    """A sandbox that dies at its host fails the call with the host's own text."""

    async def gate(_call: object) -> None:
        raise SandboxError("the machine cannot hold what it does")

    host = MemoryDriver()

    async def test(pair: Pair) -> None:
        sandbox = await placed(pair, await root(pair))
        host.gate = gate
        with pytest.raises(SandboxError, match="cannot hold"):
            await run(sandbox, "echo never")
        assert not sandbox.alive

    with_pair(tmp_path, test, host=host)


def test_call_that_leaves_processes_runs_again_at_the_owner(tmp_path: Path) -> None:
    """Only the owner can save them, so nothing of what happened on the host counts."""

    async def test(pair: Pair) -> None:
        sandbox = await placed(pair, await root(pair))
        with pytest.raises(LeftRunningError):
            await run(sandbox, "sleep 1000 &")
        assert not sandbox.alive
        await pair.quiet()

    with_pair(tmp_path, test)


def test_processes_behind_a_stream_stay_on_the_host(tmp_path: Path) -> None:
    """A client has seen the response already. Such a state is not frozen, and its sandbox goes on."""

    async def test(pair: Pair) -> None:
        sandbox = await placed(pair, await root(pair))
        seen: list[bytes] = []

        class Listener:
            async def head(self, status: int, headers: object) -> None:
                assert (status, bool(headers)) == (200, True)

            async def data(self, chunk: bytes) -> None:
                seen.append(chunk)

        left = await ran(sandbox, "sh", "-c", "echo said; sleep 1000 &", listener=Listener())
        assert (left.state, b"said" in b"".join(seen)) == (None, True)
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()
        assert (await run(sandbox, "echo on")).out == "on\n"

    with_pair(tmp_path, test)
