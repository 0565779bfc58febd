"""Typed messages in frames: structs travel as MessagePack, and are checked while they are read."""

# Theory of operation.
#
# A message is a class whose members have types; it enters a table under its `op` when it is created. On the wire it is
# an array: its op, then its members in their order. `decode` builds one decoder for each set of messages that a
# receiver expects. The decoder refuses a frame with another op, with too few or too many members, or with a member of
# the wrong type. A frame from a sandbox is untrusted input: code behind `decode` may rely on every member's type, and
# on the number of descriptors.
#
# MessagePack has neither texts that are no UTF-8 nor integers beyond 64 bits. Names of files are bytes. In a text,
# surrogates stand for those that are no UTF-8, so such texts do occur. The rare message that has one travels as JSON,
# inside a message.

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import msgspec

from sandboxes.ipc.frames import IpcFrame, MalformedFrameError, pack

_TABLE: dict[str, type["IpcMessage"]] = {}
"""All message classes by their op."""
_ENCODER = msgspec.msgpack.Encoder()


def _union(expected: tuple[type["IpcMessage"], ...]) -> Any:
    return Union[expected or tuple(_TABLE.values())]  # noqa: UP007 - made at run time


@cache
def _decoder(expected: tuple[type["IpcMessage"], ...]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(_union(expected) | _AsJson)


# Frozen, and strict about members, without a word in each class.
@dataclass_transform(frozen_default=True)
class _RecordType(msgspec.StructMeta):
    op: str
    descriptors: tuple[int, int]

    def __new__(  # noqa: PYI034 - mypy knows no `Self` of metaclasses
        cls,
        name: str,
        bases: tuple[type, ...],
        space: dict[str, Any],
        *,
        op: str | None = None,
        descriptors: tuple[int, int] = (0, 0),
    ) -> "_RecordType":
        tag_field = None if op is None else "op"
        made = super().__new__(
            cls, name, bases, space, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field=tag_field,
            tag=op,
        )  # fmt: skip
        # By class creation and not by registration: a message that a module defines cannot be forgotten.
        if op is not None:
            assert op not in _TABLE, f"two messages are called {op!r}"
            made.op, made.descriptors = op, descriptors
            _TABLE[op] = cast("type[IpcMessage]", made)
            _decoder.cache_clear()
        return made


class IpcRecord(msgspec.Struct, metaclass=_RecordType):
    """Base of what only comes as a member of messages."""


class IpcMessage(IpcRecord):
    """Base of all messages between our processes."""

    op: ClassVar[str]  # The name of the message on the wire.
    descriptors: ClassVar[tuple[int, int]]  # The smallest and the largest number of file descriptors that accompany it.


MessageT = TypeVar("MessageT", bound=IpcMessage)
MessageT_co = TypeVar("MessageT_co", covariant=True)
AnswerT = TypeVar("AnswerT", bound=IpcMessage)


class IpcRequest(IpcMessage, Generic[AnswerT]):
    """A message that is answered; the type argument is the class, or the union of classes, of its answer."""


class Envelope(NamedTuple, Generic[MessageT_co]):
    """A decoded message with what came beside it."""

    message: MessageT_co
    body: bytes  # Bytes that are no member, such as a command's output. Empty for most messages.
    fds: list[int]  # Descriptors that came along; the receiver closes them.


class _AsJson(msgspec.Struct, tag_field="op", tag="json", frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message that MessagePack cannot hold."""

    text: str


with_members = msgspec.structs.replace
"""Returns a copy of a record or message in which some members are other ones."""
members_of = msgspec.structs.asdict
"""Returns the members of a record or message by name."""


# A timeout of NaN would compare false with every limit.
Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A float that is finite."""
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
"""A float that is finite and not negative."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number of things that a database can hold."""


def plain_json(levels: int) -> Any:
    """Return the type of JSON values from an untrusted process, with a number of levels at most."""
    # `Any` would let in what JSON has not, and lists in lists a thousand times, each with room for all of the frame.
    scalar = None | bool | int | Number | str
    kind: Any = scalar
    for _ in range(levels):
        kind = scalar | list[kind] | dict[str, kind]
    return kind


def encode(message: IpcMessage) -> bytes:
    """Return a message as the content of a frame."""
    try:
        return _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError):
        return _ENCODER.encode(_AsJson(json.dumps(msgspec.to_builtins(message))))


def pack_message(message: IpcMessage, body: bytes = b"", fds: int = 0) -> bytes:
    """Return the frame of a message that fds descriptors accompany."""
    return pack(encode(message), body, fds)


def decode_bytes(content: bytes, *expected: type[MessageT]) -> MessageT:
    """Return the message of a frame's content; see `decode`."""
    try:
        message = _decoder(expected).decode(content)
        if type(message) is _AsJson:
            message = msgspec.convert(json.loads(message.text), _union(expected), str_keys=True)
    # A few thousand brackets are enough for a RecursionError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        ops = " or ".join(kind.op for kind in expected) or "a message"
        # Cut, so that a hostile frame cannot fill the log.
        raise MalformedFrameError(f"it is not {ops}: {error!s:.200}") from None
    return cast("MessageT", message)


def decode(frame: IpcFrame, *expected: type[IpcMessage]) -> Envelope[IpcMessage]:
    """Return the message in a frame, one of the expected ones or any of the table; else a MalformedFrameError."""
    content, body, fds = frame
    try:
        message = decode_bytes(content, *expected)
        _require_descriptors(message, len(fds))
    # Closed here, because a caller that gets an exception has no envelope to close them from.
    except MalformedFrameError:
        for fd in fds:
            os.close(fd)
        raise
    return Envelope(message, body, fds)


def _require_descriptors(message: IpcMessage, count: int) -> None:
    # Code behind `decode` indexes the descriptors.
    minimum, maximum = message.descriptors
    if not minimum <= count <= maximum:
        raise MalformedFrameError(f"{message.op}: {count} descriptors came, {minimum} to {maximum} belong to it")


@cache
def answers_of(request: type[IpcRequest[Any]]) -> tuple[type[IpcMessage], ...]:
    """Return the classes that an answer to a request may have."""
    # In the class's own dictionary: an inherited entry would name the answer of another request.
    bases = request.__dict__["__orig_bases__"]
    answer = next(get_args(base)[0] for base in bases if get_origin(base) is IpcRequest)
    # A union has arguments, a class has none.
    return get_args(answer) or (answer,)


def messages() -> Mapping[str, type[IpcMessage]]:
    """Return all message classes by their op."""
    return _TABLE


def prepare() -> None:
    """Build the decoder of all messages, so that processes forked from this one need not."""
    _decoder(())
