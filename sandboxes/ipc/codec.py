"""Typed messages in frames: dataclasses become JSON objects, and these are checked before they become dataclasses."""

# Theory of operation.
#
# When a message class is created, it enters a table under its `op`. On first use its type hints are
# turned into one reader function per member. `decode` looks the `op` up and runs the readers; a member that is missing,
# is not known, or has the wrong type raises `MalformedFrameError` with the op's name. A frame from a sandbox is
# untrusted input: code behind `decode` may rely on every member's type, and on the number of descriptors.
#
# Pure: it loads the standard library only, because pid 1 of a sandbox uses it too.

import math
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from sandboxes.ipc.frames import MalformedFrameError, Message, pack

Read = Callable[[Any], Any]
Write = Callable[[Any], Any]
_TABLE: dict[str, type["IpcMessage"]] = {}
"""All message classes by their op."""
_ANSWERS: dict[type, tuple[type["IpcMessage"], ...]] = {}
"""The answer classes of request classes that were used."""
_SHAPES: dict[type, "_Shape"] = {}
"""How the dataclasses that were used are read and written."""


class IpcMessage:
    """Base of all messages between our processes; a subclass is a frozen dataclass.

    Attributes:
        op: The name of the message on the wire.
        descriptors: The smallest and the largest number of file descriptors that accompany it.
    """

    op: ClassVar[str]
    descriptors: ClassVar[tuple[int, int]] = (0, 0)

    def __init_subclass__(cls, *, op: str = "", descriptors: tuple[int, int] = (0, 0)) -> None:
        """Enter the class into the table of messages under op."""
        super().__init_subclass__()
        # By class creation and not by registration: a message that a module defines cannot be forgotten.
        if op:
            assert op not in _TABLE, f"two messages are called {op!r}"
            cls.op, cls.descriptors = op, descriptors
            _TABLE[op] = cls


MessageT_co = TypeVar("MessageT_co", covariant=True)
AnswerT = TypeVar("AnswerT", bound=IpcMessage)


class IpcRequest(IpcMessage, Generic[AnswerT]):
    """A message that is answered; the type argument is the class, or the union of classes, of its answer."""


class Envelope(NamedTuple, Generic[MessageT_co]):
    """A decoded message with what came beside it.

    Attributes:
        message: The message.
        body: Bytes that are not JSON, such as a command's output. Empty for most messages.
        fds: Descriptors that came along; the receiver closes them.
    """

    message: MessageT_co
    body: bytes
    fds: list[int]


def encode(message: IpcMessage) -> dict[str, Any]:
    """Return a message as the JSON object of a frame."""
    # The op comes first, where it is seen when a frame is read by eye.
    return {"op": message.op, **_shape(type(message)).write(message)}


def pack_message(message: IpcMessage, body: bytes = b"", fds: int = 0) -> bytes:
    """Return the frame of a message that fds descriptors accompany."""
    return pack(encode(message), body, fds)


def decode(frame: Message) -> Envelope[IpcMessage]:
    """Return the message in a frame. About 10 microseconds for the answer to a call.

    Raises:
        MalformedFrameError: The frame holds no message of the table. Its descriptors are closed.
    """
    try:
        return Envelope(_read_message(frame), frame.body, frame.fds)
    # Closed here, because a caller that gets an exception has no envelope to close them from.
    except MalformedFrameError:
        for fd in frame.fds:
            os.close(fd)
        raise


def answers_of(request: type[IpcRequest[Any]]) -> tuple[type[IpcMessage], ...]:
    """Return the classes that an answer to a request may have."""
    # Looked up once for each class: type arguments are slow to resolve.
    if request not in _ANSWERS:
        # In the class's own dictionary: an inherited entry would name the answer of another request.
        bases = request.__dict__["__orig_bases__"]
        answer = next(get_args(base)[0] for base in bases if get_origin(base) is IpcRequest)
        _ANSWERS[request] = get_args(answer) if _is_union(answer) else (answer,)
    return _ANSWERS[request]


def messages() -> Mapping[str, type[IpcMessage]]:
    """Return all message classes by their op."""
    return _TABLE


def prepare() -> None:
    """Build the readers of all messages, so that processes forked from this one need not."""
    for cls in _TABLE.values():
        _shape(cls)


def _read_message(frame: Message) -> IpcMessage:
    op = frame.fields.get("op")
    # The op is untrusted: it may be a list, which no dictionary can look up.
    cls = _TABLE.get(op) if isinstance(op, str) else None
    if cls is None:
        # Cut to 60 characters, so that a hostile frame cannot fill the log.
        raise MalformedFrameError(f"{op!r:.60} is not a message")
    # Code behind `decode` indexes the descriptors, so their number is checked here.
    minimum, maximum = cls.descriptors
    if not minimum <= len(frame.fds) <= maximum:
        raise MalformedFrameError(f"{op}: {len(frame.fds)} descriptors came, {minimum} to {maximum} belong to it")
    members = {name: value for name, value in frame.fields.items() if name != "op"}
    try:
        message: IpcMessage = _shape(cls).read(members)
    except _MismatchError as error:
        raise MalformedFrameError(f"{op}: {error}") from None
    # An object that parses may still be nested too deeply for the readers, which recurse.
    except RecursionError:
        raise MalformedFrameError(f"{op}: it is nested too deeply") from None
    return message


class _MismatchError(ValueError):
    """A member of a message is missing, unknown, or of another type."""


class _Shape:
    """How one dataclass is read and written.

    Attributes:
        cls: The dataclass.
        readers: One reader for each member, by the member's name.
        writers: Writers of the members whose Python value is not their JSON value.
    """

    def __init__(self, cls: type) -> None:
        # Resolves forward references, so a class may name another that is defined below it.
        hints = get_type_hints(cls)
        # Once for each class: type hints are slow to resolve.
        codecs = {field.name: _codec(hints[field.name]) for field in fields(cls)}
        self.cls = cls
        self.readers = {name: read for name, (read, _) in codecs.items()}
        self.writers = {name: write for name, (_, write) in codecs.items() if write is not None}

    def read(self, members: Any) -> Any:
        # Exactly a dict: subclasses cannot come from JSON.
        if type(members) is not dict:
            raise _MismatchError(f"{members!r:.60} is not an object")
        values = {}
        for name, read in self.readers.items():
            try:
                # A member that is missing raises KeyError here.
                values[name] = read(members[name])
            except KeyError:
                raise _MismatchError(f"member {name!r} is missing") from None
            except _MismatchError as error:
                raise _MismatchError(f"member {name!r}: {error}") from None
        # All known members were read, so any difference in number is an unknown member.
        if len(members) != len(values):
            raise _MismatchError(f"members {sorted(members.keys() - values.keys())!r:.60} are not known")
        # Every member was checked, so the class needs no checks of its own.
        return self.cls(**values)

    def write(self, record: Any) -> dict[str, Any]:
        members = {name: getattr(record, name) for name in self.readers}
        # Only members whose Python value differs from their JSON value; most messages have none.
        for name, write in self.writers.items():
            # None stands for an absent value in every type that allows it.
            if members[name] is not None:
                members[name] = write(members[name])
        return members


def _shape(cls: type) -> _Shape:
    # Filled on first use, or by `prepare` before a launcher forks.
    if (shape := _SHAPES.get(cls)) is None:
        shape = _SHAPES[cls] = _Shape(cls)
    return shape


def _codec(hint: Any) -> tuple[Read, Write | None]:
    """Return how a value of a type is read from JSON, and written; None: it is its own JSON value."""
    arguments = get_args(hint)
    if hint is Any:
        return (lambda value: value), None
    # Accepts integers too: encoders may write 1.0 as 1.
    if hint is float:
        return _read_float, None
    if hint is bytes:
        return _read_hex, bytes.hex
    # Before unions and containers: these are by far the most members.
    if hint in {str, int, bool}:
        return _reader_of_exactly(hint), None
    if is_dataclass(hint):
        # The shape is looked up when it is needed: a record may contain its own kind.
        record: Any = hint
        return (lambda value: _shape(record).read(value)), (lambda value: _shape(record).write(value))
    if _is_union(hint):
        return _union_codec(tuple(kind for kind in arguments if kind is not types.NoneType), arguments)
    # A choice of texts is checked here, so that code behind it may match without a default.
    if get_origin(hint) is Literal:
        return _reader_of_choice(arguments), None
    if get_origin(hint) is list:
        return _list_codec(*_codec(arguments[0]))
    # The one container with a reader of its own, for its size.
    if hint == dict[str, tuple[str, int]]:
        return _read_delta, None
    # An assertion, because only our own classes get here: a new type of member needs a codec.
    assert get_origin(hint) is dict, f"no codec for {hint}"
    assert arguments[0] is str, f"no codec for {hint}"
    return _reader_of_dict(None if arguments[1] is Any else _codec(arguments[1])[0]), None


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in {Union, types.UnionType}


def _union_codec(kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Read, Write | None]:
    """Return the codec of an optional value, or of a union of messages, which differ in their op."""
    if len(kinds) == 1:
        read, write = _codec(kinds[0])
        return (lambda value: None if value is None else read(value)), write
    # None has no op, by which the codec tells messages apart.
    assert len(kinds) == len(arguments), "a union of messages is not optional"
    by_op = {kind.op: kind for kind in kinds}

    def read_one_of(value: Any) -> Any:
        # As in a frame: untrusted, so its type is looked at before its value.
        op = value.get("op") if type(value) is dict else None
        if not isinstance(op, str) or op not in by_op:
            raise _MismatchError(f"{op!r:.60} is none of {sorted(by_op)}")
        return _shape(by_op[op]).read({name: member for name, member in value.items() if name != "op"})

    return read_one_of, encode


def _reader_of_exactly(kind: type) -> Read:
    def read(value: Any) -> Any:
        # bool is an int to isinstance, and neither may stand for the other here.
        if type(value) is not kind:
            raise _MismatchError(f"{value!r:.60} is no {kind.__name__}")
        return value

    return read


def _reader_of_choice(choices: tuple[Any, ...]) -> Read:
    def read(value: Any) -> Any:
        # The type comes first, as for every untrusted value.
        if not isinstance(value, str) or value not in choices:
            raise _MismatchError(f"{value!r:.60} is none of {list(choices)}")
        return value

    return read


def _list_codec(read: Read, write: Write | None) -> tuple[Read, Write | None]:
    def read_list(value: Any) -> Any:
        # Exactly a list: a text is a sequence too, and its letters would pass as elements.
        if type(value) is not list:
            raise _MismatchError(f"{value!r:.60} is not a list")
        return [read(element) for element in value]

    if write is None:
        return read_list, None
    return read_list, lambda value: [write(element) for element in value]


def _reader_of_dict(read: Read | None) -> Read:
    def read_dict(value: Any) -> Any:
        if type(value) is not dict:
            raise _MismatchError(f"{value!r:.60} is not an object")
        # JSON has no other keys than texts, so only the values are read.
        return value if read is None else {name: read(member) for name, member in value.items()}

    return read_dict


def _read_float(value: Any) -> float:
    # An int is a number in JSON, a bool is not, although it is an int to Python.
    if type(value) not in {float, int}:
        raise _MismatchError(f"{value!r:.60} is not a number")
    try:
        number = float(value)
    # JSON has integers of any length; no float holds 10**400.
    except OverflowError:
        number = math.inf
    # Python's JSON reads NaN and Infinity. A timeout of NaN would compare false with every limit.
    if not math.isfinite(number):
        raise _MismatchError("the number is not finite")
    return number


def _read_hex(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise _MismatchError(f"{value!r:.60} is not hexadecimal") from None


def _read_delta(value: Any) -> dict[str, tuple[str, int]]:
    """Read a delta of files in one comprehension: it may have thousands of entries."""
    try:
        # Unpacking checks the length of each pair on the way.
        delta = {path: (what, at) for path, (what, at) in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise _MismatchError("a delta of files maps paths to pairs") from None
    if not all(type(what) is str and type(at) is int for what, at in delta.values()):
        raise _MismatchError("a delta's pair is a text and a number")
    return delta
