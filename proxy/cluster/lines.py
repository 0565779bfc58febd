"""The lines of a task's log as bytes.

A row of the log holds one or more lines. A line is a head of eight bytes with two lengths, a JSON array with the line's
kind and its values, and then the bytes of those values that are bytes, whose places in the array have their lengths.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from proxy.cluster.protocol import Ended, Position, StepId, Stepped
from proxy.storage import copies as stored


class Kept(NamedTuple):
    """The store has the state of a node."""

    node: int
    name: str  # Name of the state's manifest, relative to the task's objects.
    size_bytes: int  # Bytes of the state's units.


class Unkept(NamedTuple):
    """The store may lose the state of a node from here on."""

    node: int


class ForgottenRows(NamedTuple):
    """Nodes and records were deleted for good. A tree whose root is among them has gone."""

    nodes: list[int]
    records: list[int]


class Deleted(NamedTuple):
    """The task was deleted: all lines before this one say nothing any more."""


Line = stored.Copy | ForgottenRows | Deleted | Stepped | Ended | Kept | Unkept

_HEAD = struct.Struct("!II")
_KINDS: dict[str, type[Any]] = {
    "task": stored.TaskCopy, "tree": stored.TreeCopy, "record": stored.RecordCopy, "rollout": stored.RolloutCopy,
    "stepped": Stepped, "ended": Ended, "note": stored.NoteCopy, "kept": Kept, "unkept": Unkept,
    "step": stored.StepCopy, "finding": stored.FindingCopy, "node": stored.NodeCopy, "masks": stored.MasksCopy,
    "forgotten": ForgottenRows, "deleted": Deleted,
}  # fmt: skip
"""The kinds of lines. Their fields are part of the format (`joining.FORMAT`)."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


class LogError(ValueError):
    """A row of the log is not what a member of this version writes."""


def encode(lines: Iterable[Line]) -> bytes:
    """Return a row's body. 3 us for a record of 2 kB."""
    return b"".join(map(_encode_line, lines))


def decode(body: bytes) -> Iterator[Line]:
    """Yield the lines of a row. Raises LogError: the bytes are not lines."""
    at = 0
    while at < len(body):
        if len(body) - at < _HEAD.size:
            raise LogError("a row of the log is cut")
        size, blob_bytes = _HEAD.unpack_from(body, at)
        start = at + _HEAD.size
        at = start + size + blob_bytes
        if at > len(body):
            raise LogError("a row of the log is cut")
        yield _decode_line(body[start : start + size], body[start + size : at])


def _encode_line(line: Line) -> bytes:
    blobs = [value for value in line if isinstance(value, bytes)]
    values: list[Any] = [{"bytes": len(value)} if isinstance(value, bytes) else value for value in line]
    if isinstance(line, Stepped):
        values[1], values[3] = list(line.position), list(line.call)
    array = orjson.dumps([_NAMES[type(line)], *values])
    rest = b"".join(blobs)
    return _HEAD.pack(len(array), len(rest)) + array + rest


def _decode_line(array: bytes, blobs: bytes) -> Line:
    try:
        name, *values = orjson.loads(array)
        kind = _KINDS[name]
        at = 0
        for index, value in enumerate(values):
            if isinstance(value, dict):
                values[index] = blobs[at : at + value["bytes"]]
                at += value["bytes"]
        if at != len(blobs):
            raise LogError(f"a line {name!r} of the log has {len(blobs)} bytes where it says {at}")
        if kind is Stepped:
            values[1], values[3] = Position(*values[1]), StepId(*values[3])
        line: Line = kind(*values)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise LogError(f"a line of the log is malformed: {error}") from error
    return line
