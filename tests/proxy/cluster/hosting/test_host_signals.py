"""What an owner says of a call reaches the call, also if it comes at once behind it."""

import asyncio
from typing import Any, cast

import pytest

from proxy.cluster.hosting.host import _Serving
from proxy.cluster.hosting.messages import CancelHosted, Conversation, DetachHosted, EndHosted, HostedFailed, RunHosted
from sandboxes.errors import SandboxError
from sandboxes.ipc.codec import Envelope, IpcMessage
from sandboxes.listener import Cancellable, Detachable


class Owner(Conversation):
    """What an owner says at once; it ends when it has an answer."""

    def __init__(self, *messages: IpcMessage) -> None:
        self._messages, self.answers, self._answered = list(messages), list[IpcMessage](), asyncio.Event()

    async def send(self, message: IpcMessage, body: bytes = b"") -> None:
        assert not body
        self.answers.append(message)
        self._answered.set()

    async def receive(self) -> Envelope[IpcMessage] | None:
        if not self._messages:
            await self._answered.wait()
            return Envelope(EndHosted(), b"", [])
        return Envelope(self._messages.pop(0), b"", [])


class Waiting:
    """A sandbox whose calls end when they are cancelled or detached."""

    async def execute(self, _call: object, listener: object) -> None:
        assert isinstance(listener, Cancellable)
        assert isinstance(listener, Detachable)
        signals = [asyncio.ensure_future(listener.cancelled()), asyncio.ensure_future(listener.detached())]
        await asyncio.wait(signals, return_when=asyncio.FIRST_COMPLETED)
        names = zip(("cancelled", "detached"), signals, strict=True)
        signalled = " ".join(name for name, signal in names if signal.done())
        for signal in signals:
            signal.cancel()
        raise SandboxError(signalled)


@pytest.mark.parametrize(("signal", "name"), [(CancelHosted(), "cancelled"), (DetachHosted(), "detached")])
def test_signal_reaches_a_call_that_has_not_begun(signal: IpcMessage, name: str) -> None:
    async def go() -> None:
        owner = Owner(RunHosted("mcp", "call", {}, streamed=True, order=None), signal)
        serving = _Serving(owner, cast("Any", Waiting()), cast("Any", None))
        async with asyncio.timeout(10):
            await serving.serve()
        (failed,) = owner.answers
        assert isinstance(failed, HostedFailed)
        assert failed.text == name

    asyncio.run(go())
