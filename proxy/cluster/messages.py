"""What members ask each other and answer, as bytes (pure).

A message is a JSON array, four bytes with its length before it, and then bytes that belong to it: the body of a request
or a whole HTTP response.
"""

import struct
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson

from proxy.cluster.protocol import Position
from proxy.http.asgi import AsgiMessage, Scope

_SIZE = struct.Struct("!I")


class MessageError(ValueError):
    """The bytes are no message of this version."""


class CallQuestion(NamedTuple):
    """An ingress passes a request on to the owner of its task.

    Attributes:
        task: Name of the task.
        view: The owner's view, as the ingress knows it.
        number: Number of the call among those of this start of the ingress.
        oldest: Number of the oldest call of the task that the ingress still waits for.
        method, path, query, headers, scheme: The request; path is the raw path.
        kind: What the connection becomes; a `Kind`.
        body: Its body.
    """

    task: str
    view: int
    number: int
    oldest: int
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    scheme: str
    kind: str
    body: bytes

    def scope(self) -> Scope:
        """Return the ASGI scope of the request."""
        path = self.path.encode("latin-1")
        if self.kind == Kind.SOCKET:
            offered = (value for name, value in self.headers if name == "sec-websocket-protocol")
            more = {"type": "websocket", "subprotocols": [name.strip() for each in offered for name in each.split(",")]}
        else:
            more = {"type": "http"}
        return {
            **more, "http_version": "1.1", "method": self.method, "raw_path": path,
            "path": unquote(path.decode("ascii", "replace")),
            "query_string": self.query.encode("latin-1"), "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers],
            "scheme": self.scheme, "server": None, "client": None, "state": {},
        }  # fmt: skip


class Kind:
    """What the connection of a request becomes."""

    CALL = "call"
    """It gets a response, which is a stream if the owner does not have it whole."""
    SOCKET = "socket"
    """A WebSocket."""
    HIJACKED, UPGRADED = "hijacked", "upgraded"
    """A stream of bytes (Docker), after a request without or with an upgrade."""


class ReportQuestion(NamedTuple):
    """A new owner asks an ingress for positions; from then on the ingress accepts no answer of an older view.

    Attributes:
        task: Name of the task.
        view: The new owner's view.
        rollouts: The rollouts whose positions it wants.
    """

    task: str
    view: int
    rollouts: list[int]


class ConfirmQuestion(NamedTuple):
    """An owner asks an ingress whether an agent still waits for a call.

    Attributes:
        number: Number of the call.
    """

    number: int


class TakeQuestion(NamedTuple):
    """A member asks another one to take a task over.

    Attributes:
        task: Name of the task.
        view: The view that it is to be taken over from; 0 for a task that had no owner.
    """

    task: str
    view: int


class DrainQuestion(NamedTuple):
    """A member asks another one to hand over all of its tasks."""


class HandQuestion(NamedTuple):
    """A member asks the owner of a task to hand it over.

    Attributes:
        task: Name of the task.
        target: Number of the member that is to take it over.
    """

    task: str
    target: int


class DrainAnswer(NamedTuple):
    """What became of a drain, or of one task that was to be handed over.

    Attributes:
        handed: How many tasks other members have taken over.
        kept: How many tasks no member has taken over.
    """

    handed: int
    kept: int


class LoadQuestion(NamedTuple):
    """A member asks for the load of another one."""


class LoadAnswer(NamedTuple):
    """The load of a member; see `proxy.cluster.balance`.

    Attributes:
        is_leaving: Whether it takes no task over, because it was drained or stops.
        tasks: The load of each task that it owns, by name.
    """

    is_leaving: bool
    tasks: dict[str, int]


class RoomQuestion(NamedTuple):
    """An owner asks whether a member would run sandboxes for it."""


class RoomAnswer(NamedTuple):
    """What a member says of its room.

    Attributes:
        room: How many sandboxes of others it would start now.
        load: Running processes for each of its processors, over the last minute.
        elsewhere: How many sandboxes of its own tasks run on other members.
        for_others: How many sandboxes of other members' tasks run on it.
    """

    room: int
    load: float
    elsewhere: int = 0
    for_others: int = 0


class HostQuestion(NamedTuple):
    """An owner asks a member to run a sandbox for it; see `proxy.cluster.hosting.messages`.

    Attributes:
        order: The order.
    """

    order: bytes


class GiveBackQuestion(NamedTuple):
    """A host asks an owner to close sandboxes that are idle, because their room is needed.

    Attributes:
        names: Their names at the host.
    """

    names: list[str]


class GiveBackAnswer(NamedTuple):
    """What became of it.

    Attributes:
        closed: How many were closed. The others are in use, or are all that is left of a state.
    """

    closed: int


class LeaveQuestion(NamedTuple):
    """An ingress that leaves asks an owner to write the positions of its rollouts to the log."""


class LeaveAnswer(NamedTuple):
    """What became of it.

    Attributes:
        kept: How many rollouts of the owner's tasks still need the ingress.
    """

    kept: int


class CallAnswer(NamedTuple):
    """The answer to a call.

    Attributes:
        view: View of the owner.
        positions: Where the rollouts that the call moved are now, by number. None: the rollout has ended.
        response: The whole HTTP response.
    """

    view: int
    positions: dict[int, Position | None]
    response: bytes


class StreamedAnswer(NamedTuple):
    """The answer was a stream, which went to the link that brought the call. It cannot be sent again."""


class ElsewhereAnswer(NamedTuple):
    """The task has another view, or another owner, than the asker knows.

    Attributes:
        view: The view that the peer knows; 0 if it only knows that it does not own the task.
    """

    view: int


class ReportAnswer(NamedTuple):
    """What an ingress reports.

    Attributes:
        accepted: Whether the ingress knows no newer view.
        positions: Its positions of the rollouts in the question.
    """

    accepted: bool
    positions: dict[int, Position]


class ConfirmAnswer(NamedTuple):
    """Whether an agent still waits for the call.

    Attributes:
        waits: Whether it does.
    """

    waits: bool


Message = (
    CallQuestion | ReportQuestion | ConfirmQuestion | TakeQuestion | DrainQuestion | RoomQuestion | HostQuestion
    | GiveBackQuestion | LeaveQuestion | HandQuestion | LoadQuestion
    | CallAnswer | StreamedAnswer | ElsewhereAnswer | ReportAnswer | ConfirmAnswer | DrainAnswer | RoomAnswer
    | GiveBackAnswer | LeaveAnswer | LoadAnswer
)  # fmt: skip
_KINDS: dict[str, type[Any]] = {
    "call": CallQuestion, "report": ReportQuestion, "confirm": ConfirmQuestion, "take": TakeQuestion,
    "drain": DrainQuestion, "answer": CallAnswer, "streamed": StreamedAnswer,
    "elsewhere": ElsewhereAnswer, "reported": ReportAnswer,
    "confirmed": ConfirmAnswer, "drained": DrainAnswer, "room": RoomQuestion, "rooms": RoomAnswer,
    "host": HostQuestion, "give-back": GiveBackQuestion, "given-back": GiveBackAnswer,
    "leave": LeaveQuestion, "left": LeaveAnswer,
    "hand": HandQuestion, "load": LoadQuestion, "loaded": LoadAnswer,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _KINDS.items()}
_WITH_BYTES = (CallQuestion, CallAnswer, HostQuestion)
"""Messages whose last value is bytes."""
_WITH_POSITIONS = (CallAnswer, ReportAnswer)
"""Messages whose second value is positions."""


def pack_event(event: AsgiMessage) -> bytes:
    """Return an ASGI message of a stream as bytes. One of its values may be bytes."""
    values, name, rest = dict[str, Any](), "", b""
    for key, value in event.items():
        if isinstance(value, bytes | bytearray):
            name, rest = key, bytes(value)
        elif key == "headers":
            values[key] = [(header.decode("latin-1"), text.decode("latin-1")) for header, text in value]
        else:
            values[key] = value
    array = orjson.dumps([values, name])
    return _SIZE.pack(len(array)) + array + rest


def unpack_event(data: bytes) -> AsgiMessage:
    """Return the ASGI message that bytes hold.

    Raises:
        MessageError: They hold none.
    """
    try:
        (size,) = _SIZE.unpack_from(data)
        end = _SIZE.size + size
        values, name = orjson.loads(data[_SIZE.size : end])
        event: AsgiMessage = {**values, "type": str(values["type"])}
        if name:
            event[name] = data[end:]
        if "headers" in event:
            event["headers"] = [(key.encode("latin-1"), text.encode("latin-1")) for key, text in event["headers"]]
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise MessageError(f"an event of a peer's stream is malformed: {error}") from error
    return event


def pack(message: Message) -> bytes:
    """Return a message as bytes. 2 us for a request with ten headers."""
    values: list[Any] = list(message)
    rest = values.pop() if isinstance(message, _WITH_BYTES) else b""
    if isinstance(message, _WITH_POSITIONS):
        values[1] = [(rollout, *(position or ())) for rollout, position in values[1].items()]
    array = orjson.dumps([_NAMES[type(message)], *values])
    return _SIZE.pack(len(array)) + array + rest


def unpack(data: bytes) -> Message:
    """Return the message that bytes hold.

    Raises:
        MessageError: They hold none.
    """
    try:
        (size,) = _SIZE.unpack_from(data)
        end = _SIZE.size + size
        name, *values = orjson.loads(data[_SIZE.size : end])
        kind = _KINDS[name]
        if kind in _WITH_BYTES:
            values.append(data[end:])
        if kind in _WITH_POSITIONS:
            values[1] = {rollout: Position(*rest) if rest else None for rollout, *rest in values[1]}
        message: Message = kind(*values)
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise MessageError(f"a message of a peer is malformed: {error}") from error
    return message
