"""A sandbox on another member keeps the promises of the driver that runs it there."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from proxy.cluster.hosting.messages import HostedDone, execution_of, pack_execution
from sandboxes.calls import Execution, ResourceUse, ToolResult
from sandboxes.driver import Driver
from sandboxes.effects import Effect
from sandboxes.ipc.codec import decode_bytes, encode
from sandboxes.local.driver import LocalDriver
from tests.machine import require_sandboxes
from tests.proxy.cluster.hosting.pair import Pair, RemoteDriver, pair_of
from tests.proxy.cluster.hosting.test_units import SPEC, state, with_pair
from tests.sandboxes.box import run
from tests.sandboxes.contract import DriverContract
from tests.sandboxes.memory_driver import MemoryDriver


@contextmanager
def states_held(pair: Pair) -> Iterator[threading.Event]:
    """Keep states from travelling until the event is set."""
    may_go, pack = threading.Event(), pair.hosted.porter.pack

    def held(part: str) -> Iterator[bytes]:
        assert may_go.wait(30)
        yield from pack(part)

    try:
        with patch.object(pair.hosted.porter, "pack", held):
            yield may_go
    finally:
        may_go.set()


def test_calls_run_while_a_state_travels(data_dir: Path) -> None:
    """The state that arrives is the one that was frozen, and the next one follows it."""

    async def test(pair: Pair) -> None:
        sandbox = await pair.placement.restore(SPEC, await state(pair, "true"))
        with states_held(pair) as may_go:
            await run(sandbox, "echo 1 > f")
            first = await sandbox.begin_freeze()
            assert (await run(sandbox, "cat f; echo 2 > f")).out == "1\n"
            second = asyncio.ensure_future(sandbox.freeze())
            may_go.set()
            states = [await first, await second]
        await sandbox.close()
        again = [await pair.owner.restore(SPEC, frozen) for frozen in states]
        assert [(await run(each, "cat f")).out for each in again] == ["1\n", "2\n"]

    with_pair(data_dir, test)


def test_sandbox_closes_after_its_state_has_arrived(data_dir: Path) -> None:
    """It may be all that has the state."""

    async def test(pair: Pair) -> None:
        sandbox = await pair.placement.restore(SPEC, await state(pair, "true"))
        await run(sandbox, "echo 1 > f")
        with states_held(pair) as may_go:
            arriving = await sandbox.begin_freeze()
            closing = asyncio.ensure_future(sandbox.close())
            await asyncio.sleep(0)
            may_go.set()
            await closing
        assert (await run(await pair.owner.restore(SPEC, await arriving), "cat f")).out == "1\n"

    with_pair(data_dir, test)


@pytest.mark.parametrize("use", [None, ResourceUse(), ResourceUse(0.25, 1 << 40, None, 0)])
def test_owner_learns_what_a_call_used(use: ResourceUse | None) -> None:
    result = ToolResult(200, "text/plain", b"output")
    done, body = pack_execution(Execution(result, Effect.NONE, 0.1, resources=use))
    again = execution_of(decode_bytes(encode(done), HostedDone), body)
    assert (again.resources, again.result) == (use, result)


class TestRemoteSandbox(DriverContract):
    """With a driver that costs no time. People look into sandboxes of this machine only."""

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Driver:
        return RemoteDriver(Pair(MemoryDriver(), MemoryDriver(), tmp_path, room=32))


class TestRemoteLocalSandbox:
    """What states in layers add to it."""

    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_sandboxes()
        return RemoteDriver(pair_of(LocalDriver, data_dir, room=32))

    test_frozen_sandbox_continues = DriverContract.test_frozen_sandbox_continues
    test_equal_states_have_equal_digests = DriverContract.test_equal_states_have_equal_digests
    test_collecting_spares_what_is_being_frozen = DriverContract.test_collecting_spares_what_is_being_frozen
    checkpoints = False
