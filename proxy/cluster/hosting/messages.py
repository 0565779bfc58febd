"""What an owner and a host say to each other about one sandbox, over the channel that the sandbox has for its life.

| from | message | answer |
|---|---|---|
| owner | host_order, which begins the channel | lacks |
| owner | for each unit that the host lacks: small_unit, or large_unit and unit_end | hosted, or not_hosted |
| owner | run_hosted | hosted_head and hosted_data while the answer arrives, then hosted_done |
| owner | cancel_hosted, detach_hosted | none; they belong to the call that runs |
| owner | rest_hosted | rested |
| owner | freeze_hosted | hosted_state, or not_freezable |
| owner | lacks, after hosted_state | the same for each of these units, also while later messages are answered |
| owner | end_hosted | the end of the channel, once the sandbox is closed |

No freeze_hosted follows before all units of the state before have arrived. hosted_failed answers anything, and the
sandbox is dead then. The end of the channel closes the sandbox. The bytes of a large unit come over a data connection
(`proxy.cluster.link.data`), which the owner opens.
"""

from typing import Any

import orjson

from proxy.cluster.link.channels import ChannelEndedError, LinkChannel
from proxy.cluster.link.data import OpenData
from proxy.cluster.link.frames import LinkError
from sandboxes.calls import Course, EgressExchange, Execution, ResourceUse, ToolCall, ToolResult
from sandboxes.effects import Effect, StateDigest
from sandboxes.ipc.codec import Envelope, IpcMessage, IpcRecord, Number, decode, members_of, pack_message
from sandboxes.ipc.frames import Inbox, MalformedFrameError
from sandboxes.ipc.messages import ResourcesUsed


class HostingError(RuntimeError):
    """The other member has ended the conversation, or has said something that does not belong there."""


class Unit(IpcRecord):
    """A storage unit of a state.

    Attributes:
        name: Its name at the sender.
        sha256: The SHA-256 of its packed bytes, in hexadecimal; empty if the sender has not packed it yet.
        size_bytes: Its packed bytes; 0 if the sender has not packed it yet.
    """

    name: str
    sha256: str
    size_bytes: int


class HostOrder(IpcMessage, op="host_order"):
    """Restore a sandbox at a state. The body is the spec as JSON, then the payload of the state as JSON.

    Attributes:
        token: What the data connections of this sandbox begin with.
        driver: Name of the driver.
        identity: What the driver of the sender says that the spec means on its machine.
        kind: See `FrozenState.kind`.
        exact: The exact digest of the state; None if it has none.
        content: The content digest of the state; None if it has none.
        units: The storage units that the state needs.
        spec_bytes: Where the payload begins in the body.
        clock_s: The time of the owner, in seconds since the epoch.
    """

    token: bytes
    driver: str
    identity: str
    kind: str
    exact: bytes | None
    content: bytes | None
    units: list[Unit]
    spec_bytes: int
    clock_s: Number


class Lacks(IpcMessage, op="lacks"):
    """The receiver of a state lacks these of its units, by their places in the list."""

    places: list[int]


class SmallUnit(IpcMessage, op="small_unit"):
    """The bytes of a unit are the body. sha256: their SHA-256, in hexadecimal; empty if the unit cannot be read."""

    sha256: str


class LargeUnit(IpcMessage, op="large_unit"):
    """The bytes of a unit come over a data connection from now on."""


class UnitEnd(IpcMessage, op="unit_end"):
    """A large unit was sent.

    Attributes:
        sha256: The SHA-256 of its bytes, in hexadecimal; empty if it could not be read or sent.
        size_bytes: How many they are.
    """

    sha256: str
    size_bytes: int


class Hosted(IpcMessage, op="hosted"):
    """The sandbox has been started. name: its name at the host."""

    name: str


class NotHosted(IpcMessage, op="not_hosted"):
    """The sandbox is not started here.

    Attributes:
        reason: Why, for people.
        unfit: Whether this host cannot run sandboxes of this spec at all, so that it need not be asked again.
    """

    reason: str
    unfit: bool


class RunHosted(IpcMessage, op="run_hosted"):
    """Run a call; the body is its body. The members are those of `ToolCall`.

    Attributes:
        streamed: Whether the response is passed on while it arrives.
        order, last_pid: The `Course` that `driver.expect` gets before the call.
    """

    endpoint: str
    tool: str
    arguments: dict[str, Any]
    streamed: bool
    order: bytes | None
    last_pid: int = 0


class CancelHosted(IpcMessage, op="cancel_hosted"):
    """The client has cancelled the call that runs; see `listener.Cancellable`."""


class DetachHosted(IpcMessage, op="detach_hosted"):
    """The process of the call that runs is to continue in the background; see `listener.Detachable`."""


class HostedHead(IpcMessage, op="hosted_head"):
    """A tool server has begun to answer."""

    status: int
    headers: list[list[str]]


class HostedData(IpcMessage, op="hosted_data"):
    """The next piece of a tool server's answer is the body."""


class ReplayCall(IpcRecord):
    """A call in the place of the one that ran; see `Execution.replay`. arguments: as JSON."""

    endpoint: str
    tool: str
    arguments: str


class HostedDone(IpcMessage, op="hosted_done"):
    """A call has ended. The body is the body of the result, then that of the replay. The others are as in `Execution`.

    Attributes:
        effect: The bits of the effects.
        exact: The exact digest of the state after the call; None if it has none.
        content: The content digest of the state after the call; None if it has none.
        body_bytes: Where the body of the result ends.
    """

    status: int
    media_type: str
    headers: list[list[str]]
    body_bytes: int
    effect: int
    seconds: Number
    exact: bytes | None
    content: bytes | None
    witness: bytes | None
    shareable: bool
    restless: bool
    replay: ReplayCall | None
    order: bytes | None
    last_pid: int
    is_empty: bool
    live: bool
    exchanges: list[EgressExchange]
    resources: ResourcesUsed | None = None


class HostedFailed(IpcMessage, op="hosted_failed"):
    """The sandbox or its machine has failed, and the sandbox is dead.

    Attributes:
        text: What failed, for people.
        server: Whether it was a tool server; see `ServerError` for the others.
    """

    text: str
    server: bool
    silent: bool
    status: int


class RestHosted(IpcMessage, op="rest_hosted"):
    """Wait until background processes have had time to start; see `Resting`."""

    dwell_s: Number


class Rested(IpcMessage, op="rested"):
    """They have had it."""


class FreezeHosted(IpcMessage, op="freeze_hosted"):
    """Freeze the state after the last call."""


class HostedState(IpcMessage, op="hosted_state"):
    """The state was frozen; the body is its payload as JSON. The members are those of `HostOrder`."""

    kind: str
    exact: bytes | None
    content: bytes | None
    units: list[Unit]


class EndHosted(IpcMessage, op="end_hosted"):
    """Close the sandbox."""


class Conversation:
    """One end of the channel of a sandbox, as messages.

    Attributes:
        channel: The channel.
        open_data: Opens a data connection; see `OpenData`.
    """

    def __init__(self, channel: LinkChannel, open_data: OpenData) -> None:
        self.channel, self.open_data = channel, open_data

    async def send(self, message: IpcMessage, body: bytes = b"") -> None:
        """Send a message.

        Raises:
            HostingError: The other end has ended the conversation.
        """
        try:
            await self.channel.send(pack_message(message, body))
        except ChannelEndedError as error:
            raise HostingError(str(error)) from error

    async def receive(self) -> Envelope[IpcMessage] | None:
        """Return the next message; None if none follows.

        Raises:
            HostingError: What came is no message.
        """
        try:
            data = await self.channel.receive()
            return None if data is None else unpacked(data)
        except LinkError as error:
            raise HostingError(str(error)) from error

    async def expect(self, *kinds: type[IpcMessage]) -> Envelope[IpcMessage]:
        """Return the next message, which must be of one of these kinds.

        Raises:
            HostingError: It is another one, or none follows.
        """
        envelope = await self.receive()
        if envelope is None:
            raise HostingError("the conversation about a sandbox was ended")
        if not isinstance(envelope.message, kinds):
            raise HostingError(f"the message {envelope.message.op} was not expected")
        return envelope


def unpacked(data: bytes) -> Envelope[IpcMessage]:
    """Return the message that bytes hold.

    Raises:
        HostingError: They hold none.
    """
    inbox = Inbox()
    inbox.feed(data, [])
    try:
        frame = inbox.take()
        if frame is not None:
            return decode(frame)
    except MalformedFrameError as error:
        raise HostingError(str(error)) from error
    raise HostingError("a message about a sandbox is cut off")


def object_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object that bytes hold.

    Raises:
        HostingError: They hold none.
    """
    try:
        value = orjson.loads(data)
    except ValueError as error:
        raise HostingError(f"a state cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise HostingError("a state is not an object")
    return value


def digest_of(exact: bytes | None, content: bytes | None) -> StateDigest | None:
    """Return the digest that a message holds; None if it holds none."""
    return None if exact is None or content is None else StateDigest(exact, content)


def pack_execution(execution: Execution) -> tuple[HostedDone, bytes]:
    """Return what a call taught as a message and its body."""
    result, state, replay = execution.result, execution.state, execution.replay
    done = HostedDone(
        status=result.status, media_type=result.media_type, headers=[list(header) for header in result.headers],
        body_bytes=len(result.body), effect=execution.effect.value, seconds=execution.seconds,
        exact=None if state is None else state.exact, content=None if state is None else state.content,
        witness=execution.witness, shareable=execution.shareable, restless=execution.restless,
        replay=None if replay is None else _packed_replay(replay),
        order=execution.course.order, last_pid=execution.course.last_pid,
        is_empty=execution.is_empty, live=execution.live, exchanges=list(execution.exchanges),
        resources=None if execution.resources is None else ResourcesUsed(*execution.resources),
    )  # fmt: skip
    return done, result.body + (b"" if replay is None else replay.body)


def execution_of(done: HostedDone, body: bytes) -> Execution:
    """Return what a message says that a call taught.

    Raises:
        HostingError: It has values that no execution has.
    """
    try:
        effect, replay = Effect(done.effect), None
        if done.replay is not None:
            arguments = orjson.loads(done.replay.arguments)
            replay = ToolCall(done.replay.endpoint, done.replay.tool, arguments, body[done.body_bytes :])
        headers = tuple((name, value) for name, value in done.headers)
    except ValueError as error:
        raise HostingError(f"the outcome of a call cannot be read: {error}") from error
    return Execution(
        ToolResult(done.status, done.media_type, body[: done.body_bytes], headers), effect, done.seconds,
        state=digest_of(done.exact, done.content), witness=done.witness, shareable=done.shareable,
        restless=done.restless, replay=replay, course=Course(done.order, done.last_pid),
        is_empty=done.is_empty, live=done.live, exchanges=tuple(done.exchanges),
        resources=None if done.resources is None else ResourceUse(**members_of(done.resources)),
    )  # fmt: skip


def _packed_replay(call: ToolCall) -> ReplayCall:
    return ReplayCall(call.endpoint, call.tool, orjson.dumps(dict(call.arguments)).decode())
