"""Places of a client's sandboxes: a report holds at its own state, and replays reach the same digests."""

import asyncio

import pytest

from sandboxes.calls import ToolCall
from sandboxes.client.driver import ROOT, ClientDriver, ClientReport
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec

SPEC = EnvironmentSpec(driver="client")


def reported(text: str, at: bytes, *, changes: bool = True) -> ToolCall:
    return ToolCall("tvcache", "call", {"call": text}, ClientReport(at, b'"ok"', 0.25, changes).encoded())


def test_replay_reaches_the_same_state() -> None:
    """The digest covers the calls before, so equal calls after different ones are different states."""

    async def run() -> None:
        driver = ClientDriver()
        first, second = await driver.start(SPEC), await driver.start(SPEC)
        one = await first.execute(reported("a", ROOT.exact))
        assert one == await second.execute(reported("a", ROOT.exact))
        assert one.state is not None
        assert (one.result.body, one.seconds, one.effect) == (b'"ok"', 0.25, Effect.UNKNOWN)
        restored = await driver.restore(SPEC, await first.freeze())
        two = await restored.execute(reported("a", one.state.exact))
        assert two.state not in (one.state, ROOT)
        assert (await restored.execute(reported("b", two.state.exact, changes=False))).state == two.state  # type: ignore[union-attr]

    asyncio.run(run())


@pytest.mark.parametrize("call", [reported("a", b"\1" * 32), ToolCall("tvcache", "call", {"call": "a"})])
def test_report_elsewhere_is_an_error(call: ToolCall) -> None:
    """Errors of sandboxes are never recorded, so no state gets the answer of another one."""

    async def run() -> None:
        sandbox = await ClientDriver().start(SPEC)
        with pytest.raises(SandboxError):
            await sandbox.execute(call)

    asyncio.run(run())


def test_other_endpoints_have_no_tools() -> None:
    """The client runs the tools, so a shell command is refused and changes nothing."""

    async def run() -> None:
        answer = await (await ClientDriver().start(SPEC)).execute(ToolCall("shell", "exec", {"command": "id"}))
        assert (answer.result.status, answer.effect) == (501, Effect.NONE)

    asyncio.run(run())
