"""A sandbox that runs on another member, as its owner uses it.

A freeze has two parts. The host freezes the state, in a round trip. Then the units of the state travel, while the
sandbox may run its next call: what was frozen does not change. One state travels at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

from proxy.cluster.hosting.lanes import Lane, split
from proxy.cluster.hosting.messages import (
    CancelHosted,
    Conversation,
    DetachHosted,
    EndHosted,
    FreezeHosted,
    Hosted,
    HostedData,
    HostedDone,
    HostedFailed,
    HostedHead,
    HostedState,
    HostingError,
    Rested,
    RestHosted,
    RunHosted,
    digest_of,
    execution_of,
    object_of,
)
from proxy.cluster.hosting.transfers import DamagedUnitError
from proxy.cluster.hosting.units import Units
from proxy.cluster.postgres.database import Peer
from sandboxes.calls import UNKNOWN_COURSE, Course, Execution, ToolCall
from sandboxes.driver import FrozenState
from sandboxes.errors import LeftRunningError, NotFreezableError, SandboxError, ServerError
from sandboxes.ipc.codec import Envelope, IpcMessage
from sandboxes.ipc.state_messages import NotFreezable
from sandboxes.listener import Cancellable, Detachable, Listener
from sandboxes.spec import SQL_DRIVERS
from sandboxes.task_owner import TaskOwner, start

CLOSE_S = 5.0
"""How long a host may take to close a sandbox, in seconds. It does so alone then."""
ARRIVE_S = 30.0
"""How long a sandbox that is to be closed waits for a state that travels, in seconds: 1 GB takes 4. Afterwards the
state is reached by replay. Halved, a slow network loses large states; doubled, a silent host holds up a stop longer."""


class RemoteSandbox:
    """A `Sandbox` on another member. It dies with the link to that member.

    Attributes:
        id: The name of the host, and the name that the host gave the sandbox.
        place: The number of the host, and the name that the host gave the sandbox.
    """

    def __init__(
        self,
        conversation: Conversation,
        hosted: Hosted,
        host: Peer,
        units: Units,
        driver: str,
        closed: Callable[[], None],
        *,
        is_live: bool,
    ) -> None:
        """Take over a sandbox that a host has started.

        Args:
            conversation: The channel to it.
            hosted: What the host said.
            host: The member.
            units: The storage units of the driver at this member.
            driver: Name of the driver.
            closed: Called when the host has closed the sandbox.
            is_live: Whether processes run in the state that it was started at.
        """
        self.id, self.place = f"{host.name}/{hosted.name}", (host.number, hosted.name)
        self._conversation, self._host, self._units, self._driver = conversation, host.name, units, driver
        self._answers, self._arrivals = Lane(conversation), Lane(conversation)
        self._tasks = TaskOwner()
        self._arriving: asyncio.Task[FrozenState] | None = None
        self._tasks.spawn("messages of a host", split(conversation, self._answers, self._arrivals))
        self._is_dead, self._is_live, self._closed = False, is_live, closed
        self._course = UNKNOWN_COURSE
        self._frozen = ExitStack()

    @property
    def alive(self) -> bool:
        """False once the host, the link or the sandbox has ended."""
        return not self._is_dead and not self._conversation.channel.ended.is_set()

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Run a call; see `ServingSandbox.execute`.

        Raises:
            LeftRunningError: See `_conclude`.
        """
        course, self._course = self._course, UNKNOWN_COURSE
        run = RunHosted(call.endpoint, call.tool, dict(call.arguments), listener is not None, *course)
        signals = []
        try:
            await self._send(run, call.body)
            # Behind the call that they are about.
            if isinstance(listener, Cancellable):
                signals.append(start(self._signal(listener.cancelled(), CancelHosted())))
            if isinstance(listener, Detachable):
                signals.append(start(self._signal(listener.detached(), DetachHosted())))
            while True:
                envelope = await self._answer(HostedHead, HostedData, HostedDone)
                match envelope.message:
                    case HostedHead(status=status, headers=headers):
                        assert listener is not None
                        await listener.head(status, tuple((name, value) for name, value in headers))
                    case HostedData():
                        assert listener is not None
                        await listener.data(envelope.body)
                    case HostedDone() as done:
                        return self._conclude(execution_of(done, envelope.body), is_seen=listener is not None)
        except HostingError as error:
            raise self._died(str(error)) from error
        except BaseException:
            # How far a call has come that was given up is unknown.
            self._die()
            raise
        finally:
            for signal in signals:
                signal.cancel()
            await asyncio.gather(*signals, return_exceptions=True)

    def _conclude(self, execution: Execution, *, is_seen: bool) -> Execution:
        """Return what a call taught, unless it has left processes running here that can be saved at the owner only.

        Raises:
            LeftRunningError: It has, and its response was not passed on yet.
        """
        was_live, self._is_live = self._is_live, execution.state is None
        if self._is_live and not was_live and not is_seen and self._driver not in SQL_DRIVERS:
            raise LeftRunningError(f"processes are left running in sandbox {self.id}, and cannot leave their machine")
        return execution

    async def expect(self, course: Course) -> None:
        """Prepare for a replay; see `Repeating`. The course travels with the call."""
        self._course = course

    async def rest(self, dwell_s: float) -> None:
        """Let background processes start; see `Resting`."""
        try:
            # Infinity is no JSON; the host's sandbox waits for what is missing and no longer.
            await self._send(RestHosted(min(dwell_s, 1e6)))
            await self._answer(Rested)
        except HostingError as error:
            raise self._died(str(error)) from error
        except BaseException:
            self._die()
            raise

    async def freeze(self) -> FrozenState:
        """Freeze the state and bring it here; see `Sandbox.freeze`.

        Raises:
            NotFreezableError: See `begin_freeze`.
            SandboxError: See `begin_freeze`; or the state was damaged on its way.
        """
        return await (await self.begin_freeze())

    async def begin_freeze(self) -> Awaitable[FrozenState]:
        """Freeze the state, which travels while the sandbox runs on; see `EarlyFreezing`.

        Raises:
            NotFreezableError: Processes run, which stay on their machine; or the driver cannot freeze the state.
            SandboxError: The host, the link or the sandbox failed.
        """
        if self._is_live:
            raise NotFreezableError(f"processes run in sandbox {self.id}, and cannot leave their machine")
        await self._arrived()
        try:
            await self._send(FreezeHosted())
            answer = await self._answer(HostedState, NotFreezable)
        except HostingError as error:
            raise self._died(f"its state was not frozen: {error}") from error
        except BaseException:
            self._die()
            raise
        if isinstance(answer.message, NotFreezable):
            raise NotFreezableError(answer.message.reason)
        assert isinstance(answer.message, HostedState)
        arriving = self._arrive(answer.message, answer.body)
        self._arriving = self._tasks.spawn("a state of a host", arriving, awaited=True)
        return asyncio.shield(self._arriving)

    async def _arrive(self, message: HostedState, body: bytes) -> FrozenState:
        try:
            return await self._bring(message, body)
        except (HostingError, DamagedUnitError, OSError) as error:
            raise self._died(f"its state did not arrive: {error}") from error
        except BaseException:
            self._die()
            raise

    async def _arrived(self) -> None:
        """Wait until no state travels."""
        if self._arriving is not None:
            await asyncio.wait([self._arriving])

    async def close(self) -> None:
        """Return when the sandbox is closed at its host, or the host cannot be reached. Idempotent."""
        if self.alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(ARRIVE_S):
                    await self._arrived()
        if self.alive:
            self._is_dead = True
            with suppress(HostingError, TimeoutError):
                await self._conversation.send(EndHosted())
                async with asyncio.timeout(CLOSE_S):
                    await self._conversation.channel.ended.wait()
                self._closed()
        self._die()
        # A state that arrives until here holds its parts.
        await self._tasks.wait()
        self._frozen.close()

    async def _bring(self, message: HostedState, body: bytes) -> FrozenState:
        """Bring a state that the host has frozen to this member.

        Raises:
            HostingError, DamagedUnitError, OSError: See `Units.receive`.
        """
        digest, parts = digest_of(message.exact, message.content), tuple(unit.name for unit in message.units)
        payload = object_of(body)
        frozen = FrozenState(self._driver, message.kind, payload, 0, digest, parts)
        arrived, until = await self._units.receive(self._arrivals, frozen, message.units, hold=False)
        # As in a sandbox of this machine, the parts stay while it is open, until the next freeze.
        self._frozen.close()
        self._frozen = until
        return arrived

    async def _signal(self, given: Awaitable[None], message: IpcMessage) -> None:
        """Tell the host what a listener says of the call that runs."""
        await given
        with suppress(HostingError):
            await self._conversation.send(message)

    async def _send(self, message: IpcMessage, body: bytes = b"") -> None:
        if not self.alive:
            raise HostingError(f"member {self._host!r} cannot be reached")
        await self._conversation.send(message, body)

    async def _answer(self, *kinds: type[IpcMessage]) -> Envelope[IpcMessage]:
        """Return an answer of one of these kinds.

        Raises:
            SandboxError: The host says that the sandbox failed.
            HostingError: See `Conversation.expect`.
        """
        envelope = await self._answers.expect(*kinds, HostedFailed)
        if isinstance(envelope.message, HostedFailed):
            failed = envelope.message
            self._die()
            if failed.server:
                raise ServerError(failed.text, silent=failed.silent, status=failed.status)
            raise SandboxError(failed.text)
        return envelope

    def _died(self, why: str) -> SandboxError:
        self._die()
        return SandboxError(f"sandbox {self.id} on member {self._host!r} was lost: {why}. Try again.")

    def _die(self) -> None:
        self._is_dead = True
        self._conversation.channel.abort()
        # Their tasks end, also if nothing more is read.
        self._answers.end()
        self._arrivals.end()
