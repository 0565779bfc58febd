"""Nodes and records as rows: written one call at a time, with the call and its answer."""

import asyncio
import contextlib
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from proxy.storage.blobs import BlobStore, PackedBlob, note_unused_blobs, pack
from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.schema import is_whole
from proxy.tree.keys import CallKey, canonical_json
from proxy.tree.tree import Node, Record
from sandboxes.calls import UNKNOWN_COURSE, Course, Mark, ResourceUse, ToolCall, ToolResult, content_type, in_order

_LARGE_BYTES = 64 << 10
"""Answers and uploads above this size are packed in a thread: below it, packing takes less than the change of threads
and a millisecond together."""


_RESOURCES = f"SELECT {', '.join(ResourceUse._fields)} FROM records WHERE id = ? AND {is_whole('records')}"


_HEAD_BYTES = 512
"""How much of an answer is read for its marks. They follow the status, and all of them have 60 bytes."""
_MARKED = (
    f"SELECT c.id, COUNT(*), b.packed, substr(b.data, 1, {_HEAD_BYTES}) FROM steps s "
    "JOIN records c ON c.id = s.record JOIN blobs b ON b.id = c.answer WHERE s.rollout = ? AND s.turn BETWEEN ? AND ? "
    f"AND {is_whole('steps', 's')} AND {is_whole('records', 'c')} GROUP BY 1"
)


class MarkedRecord(NamedTuple):
    """A record with marks among the steps of one rollout."""

    calls: int  # How many calls of the rollout it has answered.
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class PackedCall:
    """The large parts of a record, ready to be written."""

    upload: PackedBlob
    answer: PackedBlob
    plain_answer: bytes  # The uncompressed bytes of the answer's blob.


class RecordBytes(NamedTuple):
    """The uncompressed bytes of a record's blobs, and what its call used of the machine."""

    call: bytes  # As JSON.
    upload: bytes  # Empty without one.
    answer: bytes  # See `RecordStore`.
    resources: ResourceUse


async def pack_large(call: ToolCall, result: ToolResult) -> PackedCall | None:
    """Digest and compress a large upload or answer, for `RecordStore.save`, in a thread; None for small ones."""
    if len(call.body) + len(result.body) <= _LARGE_BYTES:
        return None

    def packed() -> PackedCall:
        answer = _answer(result)
        return PackedCall(pack(call.body), pack(answer), answer)

    return await asyncio.to_thread(packed)


def same_calls(calls: str) -> str:
    """Return a query for `open_reader`: each of the calls' blobs with the first of those that ask the same, `same`.

    `calls` is a query of their numbers. Blobs of equal calls differ by what a replay is given (see `RecordStore.save`).
    """
    asks = "COALESCE(asked(packed, data), id)"
    return f"SELECT id, MIN(id) OVER (PARTITION BY {asks}) AS same FROM blobs WHERE id IN ({calls})"


class RecordStore:
    """Writes nodes and records, and reads calls and answers back.

    An answer is one blob: a line with the status, with marks if there are any (`200;memory,output`), and the media
    type, or all headers as JSON; then the body.
    """

    def __init__(self, database: StoreDatabase, blobs: BlobStore) -> None:
        self._database, self._blobs = database, blobs

    def new_node_id(self) -> int:
        """Return a number for a node that no node ever had."""
        return self._database.take_number("nodes")

    def new_record_id(self) -> int:
        """Return a number for a record that no record ever had."""
        return self._database.take_number("records")

    def save(
        self,
        tree: int,
        record: Record,
        node: Node | None,
        call: ToolCall,
        result: ToolResult,
        course: Course = UNKNOWN_COURSE,
        packed: PackedCall | None = None,
        resources: ResourceUse | None = None,
    ) -> RecordBytes:
        """Write a record with its call and answer in one transaction, set its blobs' numbers, and return the bytes.

        `node` is the one that the call created, if any; `course` is what a replay is given; `packed` is from
        `pack_large`. Raises StoreError if nothing could be written, so the call must not count as recorded.
        """
        with self._database.transaction() as execute:
            value: dict[str, Any] = {"endpoint": call.endpoint, "tool": call.tool, "arguments": call.arguments}
            # With the call, because it is what a replay needs besides: so it also travels with exported trees.
            if course.order is not None:
                value["order"] = course.order.hex()
            if course.last_pid and not record.observation:
                value["last_pid"] = course.last_pid
            answer = packed.plain_answer if packed else _answer(result)
            written = RecordBytes(canonical_json(value), call.body, answer, resources or ResourceUse())
            record.call = self._blobs.insert(execute, written.call)
            if call.body:
                record.upload = self._blobs.insert(execute, packed.upload if packed else call.body)
            record.answer = self._blobs.insert(execute, packed.answer if packed else written.answer)
            if node is not None:
                insert_node(execute, tree, node)
            values = (
                record.id, tree, record.source.id, record.key, record.target.id, record.call, record.upload,
                record.answer, record.effect.value, record.seconds, record.recorded_at, record.private,
                record.reproducible, None if record.age_s == math.inf else record.age_s, record.proven, False,
                *written.resources,
            )  # fmt: skip
            execute(f"INSERT INTO records VALUES ({','.join('?' * len(values))})", values)
        return written

    def save_key(self, record: Record, key: CallKey) -> None:
        """Write that a record has another key, under which no call finds it."""
        with self._database.transaction() as execute:
            execute("UPDATE records SET key = ?, private = 1 WHERE id = ?", (key, record.id))

    def save_node(self, node: Node) -> None:
        """Write what may change about a node: its digests, its pin, and why it diverged."""
        with self._database.transaction() as execute:
            execute(
                "UPDATE nodes SET exact = ?, content = ?, diverged = ?, pinned = ? WHERE id = ?",
                (*stored_digests(node), node.diverged, node.pinned, node.id),
            )

    def save_divergence(self, record: Record, lost: Iterable[Node]) -> None:
        """Write that a record does not reproduce its target, and which nodes were set aside for it."""
        with self._database.transaction() as execute:
            execute("UPDATE records SET reproducible = 0 WHERE id = ?", (record.id,))
            update_diverged(execute, lost)

    def save_proven(self, records: Iterable[Record]) -> None:
        """Write that replays have reached the targets of these records."""
        with self._database.transaction() as execute:
            for record in records:
                execute("UPDATE records SET proven = 1 WHERE id = ?", (record.id,))

    def save_set_aside(self, nodes: Iterable[Node]) -> None:
        """Write why nodes were set aside."""
        with self._database.transaction() as execute:
            update_diverged(execute, nodes)

    def forget(self, nodes: Iterable[Node], records: Iterable[Record]) -> None:
        """Delete nodes and records. The blobs that nothing else needs go with the next sweep."""
        with self._database.transaction() as execute:
            for node in nodes:
                execute("DELETE FROM nodes WHERE id = ?", (node.id,))
            for record in records:
                execute("DELETE FROM records WHERE id = ?", (record.id,))
                execute("DELETE FROM findings WHERE record = ?", (record.id,))
            note_unused_blobs(execute)
            self._database.keep_numbers(execute)

    def call(self, record: Record) -> ToolCall:
        """Return the recorded call."""
        return self.call_and_course(record)[0]

    def call_and_course(self, record: Record) -> tuple[ToolCall, Course]:
        """Return the recorded call, and what is known of it for a replay."""
        value, course = orjson.loads(self._blobs.read(record.call)), UNKNOWN_COURSE
        body = self._blobs.read(record.upload) if record.upload else b""
        # An imported tree comes from elsewhere.
        with contextlib.suppress(TypeError, ValueError):
            order = value.get("order")
            course = Course(None if order is None else bytes.fromhex(order), int(value.get("last_pid", 0)))
        return ToolCall(value["endpoint"], value["tool"], value["arguments"], body), course

    def call_without_upload(self, blob: int) -> ToolCall:
        """Return a call by the number of its blob, without the bytes that were uploaded with it."""
        value = orjson.loads(self._blobs.read(blob))
        return ToolCall(value["endpoint"], value["tool"], value["arguments"])

    def result(self, record: Record) -> ToolResult:
        """Return the recorded answer."""
        return answer_of(self._blobs.read(record.answer))

    def resources(self, record: Record) -> ResourceUse | None:
        """Return what the recorded call used of the machine; None if nothing is known."""
        row = self._database.row(_RESOURCES, (record.id,))
        use = ResourceUse(*row or ())
        return None if use == ResourceUse() else use

    def origin(self, record: int) -> tuple[int, int] | None:
        """Return the numbers of a record's tree and of the node where it was made; None if it was deleted."""
        row = self._database.row("SELECT tree, source FROM records WHERE id = ?", (record,))
        return None if row is None else (row[0], row[1])


def _answer(result: ToolResult) -> bytes:
    kind = orjson.dumps(result.headers).decode() if result.headers else result.media_type
    marks = f";{','.join(result.marks)}" if result.marks else ""
    return f"{result.status}{marks} {kind}\n".encode() + result.body


def marked_records(
    database: StoreDatabase, rollout: int, first: int = 0, last: int = 1 << 62
) -> dict[int, MarkedRecord]:
    """Return the marked records of a rollout's calls of some turns, by number. Fold the journal before."""
    rows = database.rows(_MARKED, (rollout, first, last))
    found = {record: MarkedRecord(calls, _marks_of(data, packed=packed)) for record, calls, packed, data in rows}
    return {record: each for record, each in found.items() if each.marks}


def _marks_of(data: bytes, *, packed: bool) -> tuple[Mark, ...]:
    """Return the marks in the first bytes of an answer's blob; none if these cannot be read."""
    with contextlib.suppress(zlib.error):
        head = zlib.decompressobj().decompress(data, _HEAD_BYTES) if packed else data
        return in_order(head.partition(b" ")[0].decode(errors="replace").partition(";")[2].split(","))
    return ()


def answer_of(data: bytes) -> ToolResult:
    """Return the answer that a blob holds."""
    head, _, body = data.partition(b"\n")
    first, _, kind = head.decode().partition(" ")
    status, _, marks = first.partition(";")
    if kind.startswith("["):
        headers = tuple((name, value) for name, value in orjson.loads(kind))
        return ToolResult(int(status), content_type(headers), body, headers, in_order(marks.split(",")))
    return ToolResult(int(status), kind, body, marks=in_order(marks.split(",")))


def insert_node(execute: Execute, tree: int, node: Node) -> None:
    """Write a new node of a tree."""
    values = (node.id, tree, *stored_digests(node), node.diverged, node.pinned)
    execute("INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?)", values)


def update_diverged(execute: Execute, nodes: Iterable[Node]) -> None:
    """Write why each of these nodes was set aside."""
    for node in nodes:
        execute("UPDATE nodes SET diverged = ? WHERE id = ?", (node.diverged, node.id))


def stored_digests(node: Node) -> tuple[bytes | None, bytes | None]:
    """Return the columns exact and content; a node without a state digest has only its witness, as content."""
    return (node.state.exact, node.state.content) if node.state else (None, node.witness)
