"""The proxy's link to one sandbox's supervisor: pid 1. If it fails, the sandbox is dead."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, overload

from sandboxes.errors import SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.codec import AnswerT, Envelope, IpcMessage, IpcRequest

GRACE_S = 60.0
"""How long over a call's own time the supervisor may take, to kill and to compare files, until it counts as dead.
Comparing the most files that count takes seconds on a busy machine. Half of this has been too short there."""

ResultT = TypeVar("ResultT")
FirstT = TypeVar("FirstT", bound=IpcMessage)
SecondT = TypeVar("SecondT", bound=IpcMessage)


class GuestLink:
    """Sends requests to a supervisor, and declares its sandbox dead when the supervisor fails."""

    def __init__(self, name: str, channel: Channel, kill: Callable[[], None]) -> None:
        """Take over a channel to a sandbox's supervisor; `kill` ends the sandbox once it is declared dead."""
        # A supervisor may have died between its start and this line; the channel knows.
        self.name, self.death = name, None if channel.lost is None else channel.lost
        self._channel, self._kill = channel, kill

    @property
    def alive(self) -> bool:
        """Whether requests can be sent."""
        # Two signs: the channel notices a dead process at once, and `death` also covers a supervisor that hangs.
        return self.death is None and self._channel.lost is None

    def die(self, reason: str) -> None:
        """Declare the sandbox dead, and kill what runs in it. Only the first reason is kept."""
        # The first reason is the cause; what follows, such as a closed channel, is its effect.
        self.death = self.death or reason
        # A dead sandbox may still run processes that change its files, so they end now and not at the close.
        self._kill()

    def close(self, reason: str = "closed") -> None:
        """Close the channel."""
        # Before the channel closes: callers that wait there get this reason.
        self.death = self.death or reason
        self._channel.close(self.death)

    async def call(
        self, request: IpcRequest[AnswerT], body: bytes, timeout_s: float, fds: Sequence[int] = ()
    ) -> Envelope[AnswerT]:
        """Send a request that may change the sandbox and return its answer; a cancellation kills the sandbox."""
        try:
            # The supervisor's own timer comes first; this limit is for a supervisor that does not keep it.
            return await self.ask(request, body, fds, within_s=timeout_s + GRACE_S)
        except asyncio.CancelledError:
            self.die("its call was cancelled")
            raise

    async def ask(
        self, request: IpcRequest[AnswerT], body: bytes = b"", fds: Sequence[int] = (), *, within_s: float = GRACE_S
    ) -> Envelope[AnswerT]:
        """Send a request and return its answer, which the supervisor has to give within_s. Errors as for `call`."""
        # Checked here and by the channel: a sandbox declared dead may still have an open channel.
        self._require_life()
        return await self._await(self._channel.ask(request, body, fds), within_s)

    @overload
    async def next(self, first: type[FirstT], /) -> Envelope[FirstT]: ...

    @overload
    async def next(self, first: type[FirstT], second: type[SecondT], /) -> Envelope[FirstT | SecondT]: ...

    async def next(self, *expected: type[IpcMessage]) -> Envelope[Any]:
        """Return the next message that the supervisor sends unasked. Errors as for `call`."""
        self._require_life()
        return await self._await(self._channel.next(*expected), GRACE_S)

    async def post(self, message: IpcMessage) -> None:
        """Send a message that is not answered."""
        await self._channel.post(message)

    def _require_life(self) -> None:
        if self.death is not None:
            raise SandboxError(f"sandbox {self.name} died: {self.death}")

    async def _await(self, answer: Awaitable[ResultT], within_s: float) -> ResultT:
        # A timer that closes the channel, which wakes all that wait there: half the CPU of a timeout of this task.
        timer = asyncio.get_running_loop().call_later(within_s, self._give_up, within_s)
        try:
            return await answer
        # After either, the supervisor has ended, or its frames cannot be trusted.
        except (ChannelClosedError, PeerFailedError) as error:
            self.die(str(error))
            raise SandboxError(f"sandbox {self.name} died: {error}") from error
        finally:
            timer.cancel()

    def _give_up(self, within_s: float) -> None:
        # The request may still run in there, so the sandbox cannot serve another call.
        self.die("it gave no answer in time")
        self._channel.close(f"it gave no answer within {within_s:.0f} s")
