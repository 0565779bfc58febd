"""The host: it starts sandboxes for other members with its own drivers, in its own budget, and runs their calls.

A sandbox lives as long as its channel. If its owner ends the channel, or the link breaks, it is closed here.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

import orjson
import structlog
from pydantic import ValidationError

from proxy.cluster.hosting.messages import (
    CancelHosted,
    Conversation,
    DetachHosted,
    EndHosted,
    FreezeHosted,
    Hosted,
    HostedData,
    HostedFailed,
    HostedHead,
    HostedState,
    HostingError,
    HostOrder,
    Lacks,
    NotHosted,
    Rested,
    RestHosted,
    RunHosted,
    digest_of,
    object_of,
    pack_execution,
    unpacked,
)
from proxy.cluster.hosting.transfers import DamagedUnitError
from proxy.cluster.hosting.units import Units, chosen
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.data import ExpectedData
from proxy.cluster.link.frames import Hello
from proxy.cluster.messages import GiveBackQuestion, Message, RoomAnswer
from proxy.telemetry.counters import HostingCounters
from sandboxes.calls import Course, ToolCall
from sandboxes.driver import Driver, FrozenState, Sandbox, execute, expect, rest
from sandboxes.errors import NotFreezableError, SandboxError, ServerError, SpecError, StateGoneError
from sandboxes.ipc.codec import Envelope, IpcMessage, pack_message
from sandboxes.ipc.state_messages import NotFreezable
from sandboxes.listener import Headers
from sandboxes.pool.pool import OverloadedError, Pool
from sandboxes.pool.roster import FOR_OTHERS, Slot
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()


CLOCK_BEHIND_S = 0.5
"""How far the clock of a host may be behind the owner's, in seconds.

Files that a call writes must not look older than the root state: drivers would take their times for set ones, and the
digests of equal states would differ.
"""


MAX_TASKS = 3
"""Most tasks for one sandbox: one whose answer has just gone, the next one, and one that sends units. An owner that
keeps to the protocol never needs more."""


class Host:
    """Runs sandboxes of other members."""

    def __init__(
        self,
        drivers: Mapping[str, Driver],
        pool: Pool,
        units: Mapping[str, Units],
        counts: HostingCounters,
        has_memory: Callable[[], bool],
        data: ExpectedData,
    ) -> None:
        """Host for others.

        Args:
            drivers: The drivers by name.
            pool: The budget that sandboxes of others take room in.
            units: The storage units of the drivers whose sandboxes may come here.
            counts: Where sandboxes are counted.
            has_memory: Returns whether this machine has memory for more processes.
            data: The data connections that this member takes.
        """
        self._drivers, self._pool, self._units = drivers, pool, units
        self._counts, self._has_memory, self._data = counts, has_memory, data
        self._served: dict[_Serving, int] = {}

    @property
    def room(self) -> RoomAnswer:
        """How many sandboxes of others this member would start now, and how busy its processors are."""
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        spare = self._pool.spare if self._has_memory() else 0
        return RoomAnswer(spare, load, self._pool.roster.elsewhere, len(self._served))

    async def serve(self, hello: Hello, content: bytes, begin: Callable[[], LinkChannel]) -> bytes:
        """Host one sandbox for its whole life, or return why not.

        Args:
            hello: The owner.
            content: Its order.
            begin: Begins the channel of the sandbox.
        """
        try:
            order, spec, frozen = _read(unpacked(content))
            await self._require_fit(order, spec)
        except HostingError as error:
            return pack_message(NotHosted(str(error), unfit=True))
        with self._data.expected(order.token) as open_data:
            try:
                slot = self._pool.reserve(FOR_OTHERS)
            except OverloadedError as error:
                return pack_message(NotHosted(str(error), unfit=False))
            await self._host(hello, order, spec, frozen, slot, Conversation(begin(), open_data))
        return b""

    async def _host(
        self,
        hello: Hello,
        order: HostOrder,
        spec: EnvironmentSpec,
        frozen: FrozenState,
        slot: Slot,
        conversation: Conversation,
    ) -> None:
        """Host one sandbox in a slot, for its whole life."""
        try:
            units = self._units[order.driver]
            try:
                state, until = await units.receive(conversation, frozen, order.units, hold=True)
                # Until the sandbox is there: it keeps its own units then.
                with until:
                    make = partial(self._drivers[order.driver].restore, spec, state)
                    await self._pool.fill(slot, make, FOR_OTHERS)
            except (DamagedUnitError, SandboxError, SpecError, OSError) as error:
                log.warning("a sandbox of another member was not started", owner=hello.member, reason=str(error))
                await conversation.send(NotHosted(str(error), unfit=isinstance(error, SpecError | StateGoneError)))
                return
            assert slot.sandbox is not None
            self._counts.hosted += 1
            await conversation.send(Hosted(slot.sandbox.id))
            serving = _Serving(conversation, slot.sandbox, units)
            self._served[serving] = hello.member
            try:
                await serving.serve()
            finally:
                del self._served[serving]
        except HostingError as error:
            log.debug("a sandbox of another member ends", owner=hello.member, reason=str(error))
        finally:
            await self._pool.close(slot)
            # Now the owner may use the room again.
            conversation.channel.close()

    async def reclaim(self, count: int, ask: Callable[[int, Message], Awaitable[Message | None]]) -> None:
        """Ask owners to close sandboxes here, those that have been idle longest first.

        Args:
            count: How many at most.
            ask: Asks a member by its number.
        """
        idle = (serving for serving in self._served if not serving.is_busy)
        chosen = sorted(idle, key=lambda serving: serving.used_at)[:count]
        for owner in {self._served[serving] for serving in chosen}:
            names = [serving.sandbox.id for serving in chosen if self._served.get(serving) == owner]
            await ask(owner, GiveBackQuestion(names))

    async def _require_fit(self, order: HostOrder, spec: EnvironmentSpec) -> None:
        """Check that a spec means the same here as at the owner.

        Raises:
            HostingError: It does not, or sandboxes of its driver do not run for others.
        """
        driver = self._drivers.get(order.driver)
        if driver is None or order.driver not in self._units or spec.driver != order.driver:
            raise HostingError(f"this member hosts no sandboxes of the driver {order.driver!r}")
        try:
            identity = await driver.identity(spec)
        except (SpecError, SandboxError, OSError) as error:
            raise HostingError(f"the environment cannot be used here: {error}") from error
        if time.time() < order.clock_s - CLOCK_BEHIND_S:
            raise HostingError("the clock of this machine is behind that of the owner. Set both by NTP")
        if identity != order.identity:
            raise HostingError("the environment means something else here: its base or a source differs")


class _Serving:
    """Answers what the owner of one sandbox asks of it.

    Attributes:
        sandbox: The sandbox.
        used_at: When the owner last asked something, on the monotonic clock.
    """

    def __init__(self, conversation: Conversation, sandbox: Sandbox, units: Units) -> None:
        self._conversation, self.sandbox, self._units = conversation, sandbox, units
        self.used_at = time.monotonic()
        self._tasks = TaskOwner()
        self._work: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._listener: _ChannelListener | None = None
        self._frozen: FrozenState | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the owner waits for an answer or a state."""
        return len(self._tasks) > 0

    async def serve(self) -> None:
        """Answer until the channel ends. A call that runs then is cancelled.

        Raises:
            HostingError: The owner says something that does not belong here.
        """
        try:
            while (envelope := await self._conversation.receive()) is not None:
                if isinstance(envelope.message, EndHosted):
                    return
                self._take(envelope)
        finally:
            self._tasks.cancel()
            await self._tasks.wait()

    def _take(self, envelope: Envelope[IpcMessage]) -> None:
        match envelope.message:
            case CancelHosted():
                if self._listener is not None:
                    self._listener.is_cancelled.set()
            case DetachHosted():
                if self._listener is not None:
                    self._listener.is_detached.set()
            case Lacks() as lacks if self._frozen is not None:
                # Beside the next call: what was frozen does not change.
                frozen, self._frozen = self._frozen, None
                self._sending = self._tasks.spawn("send a state", self._answer(self._send_lacking(frozen, lacks)))
            case _ if len(self._tasks) >= MAX_TASKS:
                raise HostingError("the owner asks for two things at once")
            case message:
                listener = None
                if isinstance(message, RunHosted) and message.streamed:
                    # Already now: the owner may cancel the call before it begins.
                    listener = self._listener = _ChannelListener(self._conversation)
                # In a task: the channel may end, or the call be cancelled, while it runs.
                work = self._answer(self._perform(envelope, self._work, listener))
                self._work = self._tasks.spawn("work for an owner", work)
                self.used_at = time.monotonic()

    async def _answer(self, work: Awaitable[None]) -> None:
        try:
            await work
        except HostingError:
            self._conversation.channel.abort()
        except (SandboxError, OSError) as error:
            silent, status = (error.silent, error.status) if isinstance(error, ServerError) else (False, 0)
            with suppress(HostingError):
                failed = HostedFailed(str(error), isinstance(error, ServerError), silent, status)
                await self._conversation.send(failed)
        except Exception:
            log.exception("a sandbox of another member failed")
            self._conversation.channel.abort()

    async def _perform(
        self, envelope: Envelope[IpcMessage], before: asyncio.Task[None] | None, listener: "_ChannelListener | None"
    ) -> None:
        if before is not None:
            # Its answer may have gone, while this end still waits for units behind it to go.
            await asyncio.wait([before])
        match envelope.message:
            case RunHosted() as run:
                await self._run(run, envelope.body, listener)
            case RestHosted(dwell_s=dwell_s):
                await rest(self.sandbox, dwell_s)
                await self._conversation.send(Rested())
            case FreezeHosted():
                await self._freeze()
            case other:
                raise HostingError(f"the message {other.op} was not expected")

    async def _send_lacking(self, frozen: FrozenState, lacks: Lacks) -> None:
        await self._units.send(self._conversation, chosen(self._units.of(frozen), lacks))
        # The owner has it now, and may want another sandbox at this state here.
        self._units.keep(frozen)

    async def _run(self, run: RunHosted, body: bytes, listener: "_ChannelListener | None") -> None:
        call = ToolCall(run.endpoint, run.tool, run.arguments, body)
        try:
            await expect(self.sandbox, Course(run.order, run.last_pid))
            execution = await execute(self.sandbox, call, listener)
        finally:
            self._listener = None
        await self._conversation.send(*pack_execution(execution))

    async def _freeze(self) -> None:
        if self._sending is not None:
            # The owner has the state before this one, and this end may not have noticed that yet.
            await asyncio.wait([self._sending])
        try:
            frozen = await self.sandbox.freeze()
        except NotFreezableError as error:
            await self._conversation.send(NotFreezable(str(error)))
            return
        if not self._units.porter.carries(frozen.kind):
            await self._conversation.send(NotFreezable("processes run, and cannot leave their machine"))
            return
        self._frozen, state = frozen, frozen.state
        exact, content = (None, None) if state is None else (state.exact, state.content)
        message = HostedState(frozen.kind, exact, content, self._units.of(frozen))
        await self._conversation.send(message, orjson.dumps(frozen.payload))


class _ChannelListener:
    """Passes a response on to the owner while it arrives. An owner that is gone ends the sandbox, not the listener."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.is_cancelled, self.is_detached = asyncio.Event(), asyncio.Event()

    async def head(self, status: int, headers: Headers) -> None:
        """See `Listener.head`."""
        with suppress(HostingError):
            await self._conversation.send(HostedHead(status, [list(header) for header in headers]))

    async def data(self, chunk: bytes) -> None:
        """See `Listener.data`."""
        with suppress(HostingError):
            await self._conversation.send(HostedData(), chunk)

    async def cancelled(self) -> None:
        """See `Cancellable`."""
        await self.is_cancelled.wait()

    async def detached(self) -> None:
        """See `Detachable`."""
        await self.is_detached.wait()


def _read(envelope: Envelope[IpcMessage]) -> tuple[HostOrder, EnvironmentSpec, FrozenState]:
    """Return an order, and its spec and state.

    Raises:
        HostingError: The order is malformed.
    """
    order, body = envelope.message, envelope.body
    if not isinstance(order, HostOrder):
        raise HostingError("a sandbox begins with an order")
    try:
        spec = EnvironmentSpec.model_validate_json(body[: order.spec_bytes])
    except ValidationError as error:
        raise HostingError(f"the environment cannot be read here: {error.errors()[0]['msg']}") from error
    payload = object_of(body[order.spec_bytes :])
    digest, parts = digest_of(order.exact, order.content), tuple(unit.name for unit in order.units)
    return order, spec, FrozenState(order.driver, order.kind, payload, 0, digest, parts)
