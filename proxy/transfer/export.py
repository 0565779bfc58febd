"""Writes a tree as a bundle: in one pass over the store, in a thread, in constant memory.

The k-th node that travels has number k. A record is written after the nodes that it names, and after its blobs, so that
a reader never needs to look ahead. Records are in the order in which they were made. Those whose source is not known
yet wait for a later pass: a private call may have made a node first, which another history met later.
"""

import sqlite3
import time
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import orjson

from proxy.storage.errors import StoreError
from proxy.transfer.format import BLOCK, FORMAT, Writer
from proxy.transfer.state_records import ExportedStates
from proxy.tree.keys import KEY_VERSION
from proxy.tree.tree import Tree
from sandboxes.calls import ResourceUse

_BATCH = 1000
"""Nodes and records in one part of the bundle: about 300 kB, which the reader holds in memory."""
_LINE_BYTES = 700
"""About how long the lines of a record and of the node that it leads to are together."""
_HEAD_BYTES = BLOCK + BLOCK // 2
"""Bytes of a blob's header and, on average, of its padding."""
_SENT_BYTES = 256 << 10
"""Bytes that are collected before they are sent: fewer, larger writes to the socket."""


def export(
    connection: sqlite3.Connection, task: str, tree: Tree, states: ExportedStates, *, current: bool
) -> Iterator[bytes]:
    """Yield the bytes of a tree's bundle from a reader of the store, which is closed. Blocking: for a thread.

    Private records are left out, because their answers are for one rollout, and so are states that were set aside.
    `current` is whether the tree belongs to the task's own environment. Raises StoreError if the store lacks a blob.
    """
    try:
        # One transaction sees one moment of the store, whatever is recorded meanwhile.
        connection.execute("BEGIN")
        pending = bytearray()
        for piece in _Export(connection, task, tree, states, current=current).parts():
            pending += piece
            if len(pending) >= _SENT_BYTES:
                yield bytes(pending)
                pending.clear()
        yield bytes(pending)
    finally:
        connection.close()


def estimated_bytes(connection: sqlite3.Connection, tree: int) -> int:
    """Return about how large a tree's bundle is without snapshots, and close the reader. Blocking."""
    blobs = " UNION ".join(f"SELECT {name} FROM records WHERE tree = :tree" for name in ("call", "upload", "answer"))
    with closing(connection):
        (records,) = connection.execute("SELECT COUNT(*) FROM records WHERE tree = :tree", {"tree": tree}).fetchone()
        count, size = connection.execute(
            f"SELECT COUNT(*), COALESCE(SUM(LENGTH(data)), 0) FROM blobs WHERE id IN ({blobs})", {"tree": tree}
        ).fetchone()
    return int(records * _LINE_BYTES + count * _HEAD_BYTES + size)


@dataclass(slots=True)
class _Numbers:
    """The numbers of the nodes that travel: 16 bytes for a node."""

    ids: "array[int]" = field(default_factory=lambda: array("q"))  # Numbers in the store, ascending.
    numbers: "array[int]" = field(default_factory=lambda: array("q"))  # The number in the bundle of each of them.
    # Nodes that came after a node with a higher number, as (number in the store, number in the bundle).
    late: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids) + len(self.late)

    def of(self, node: int) -> int | None:
        position = bisect_left(self.ids, node)
        if position < len(self.ids) and self.ids[position] == node:
            return self.numbers[position]
        position = bisect_left(self.late, (node, 0))
        return self.late[position][1] if position < len(self.late) and self.late[position][0] == node else None

    def add(self, node: int) -> None:
        number = len(self)
        if self.ids and self.ids[-1] >= node:
            insort(self.late, (node, number))
            return
        self.ids.append(node)
        self.numbers.append(number)


class _Export:
    def __init__(
        self, connection: sqlite3.Connection, task: str, tree: Tree, states: ExportedStates, *, current: bool
    ) -> None:
        self._connection, self._task, self._tree, self._states = connection, task, tree, states
        self._current = current
        self._writer, self._numbers = Writer(), _Numbers()
        self._sent = bytearray()

    def parts(self) -> Iterator[bytes]:
        # The manifest comes first and states how much follows, so everything is counted before anything is sent.
        nodes, records = self._count()
        snapshots, left_out = self._states.count(self._numbers.of)
        self._numbers = _Numbers()
        self._numbers.add(self._tree.root.id)
        yield self._writer.json(
            "manifest",
            {
                "forkpoint": version("forkpoint"), "format": FORMAT, "key_version": KEY_VERSION, "task": self._task,
                "root_key": self._tree.key, "spec": self._tree.spec.redacted().model_dump(mode="json"),
                "current": self._current, "nodes": nodes,
                "records": records, "exported_at": time.time(), "snapshots": snapshots, "snapshots_left_out": left_out,
            },
        )  # fmt: skip
        lines = [self._node_line(self._tree.root.id)]
        for row, is_new in self._travelling():
            if is_new:
                lines.append(self._node_line(row["target"]))
            digests = {}
            for member in ("call", "upload", "answer"):
                digest, parts = self._blob(row[member])
                digests[member] = digest
                yield from parts
            lines.append(self._record_line(row, digests))
            if len(lines) >= _BATCH:
                yield self._batch(lines)
                lines = []
        if lines:
            yield self._batch(lines)
        yield from self._states.parts(self._writer, self._numbers.of)
        yield self._writer.seal()

    def _count(self) -> tuple[int, int]:
        self._numbers.add(self._tree.root.id)
        records = sum(1 for _ in self._travelling())
        return len(self._numbers), records

    def _travelling(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the records that travel, and whether each is the first one that leads to its target."""
        waiting: array[int] = array("q")
        yield from self._reached(self._rows("TRUE"), waiting)
        # A record may wait for one that has a higher number, so passes go on until one of them reaches nothing.
        while waiting:
            again: array[int] = array("q")
            rows = (row for number in waiting for row in self._rows("r.id = ?", number))
            yield from self._reached(rows, again)
            if len(again) == len(waiting):
                return
            waiting = again

    def _rows(self, which: str, *values: int) -> Iterator[dict[str, Any]]:
        sql = (
            "SELECT r.id, r.source, r.key, r.target, r.call, r.upload, r.answer, r.effect, r.seconds, r.recorded_at, "
            "r.reproducible, r.age_s, r.cpu_s, r.peak_bytes, r.read_bytes, r.written_bytes FROM records r "
            "JOIN nodes n ON n.id = r.target JOIN nodes m ON m.id = r.source "
            "WHERE r.tree = ? AND r.private = 0 AND n.diverged = '' AND m.diverged = '' "
            f"AND NOT r.quarantined AND r.id NOT IN (SELECT record FROM findings) AND {which} ORDER BY r.id"
        )
        cursor = self._connection.execute(sql, (self._tree.id, *values))
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield dict(zip(names, row, strict=True))

    def _reached(self, rows: Iterator[dict[str, Any]], waiting: "array[int]") -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the rows whose source is known; note the numbers of the others in `waiting`."""
        for row in rows:
            if self._numbers.of(row["source"]) is None:
                waiting.append(row["id"])
                continue
            is_new = self._numbers.of(row["target"]) is None
            if is_new:
                self._numbers.add(row["target"])
            yield row, is_new

    def _node_line(self, node: int) -> bytes:
        exact, content, pinned = self._connection.execute(
            "SELECT exact, content, pinned FROM nodes WHERE id = ?", (node,)
        ).fetchone()
        number = self._numbers.of(node)
        return orjson.dumps({"node": number, "exact": _hex(exact), "content": _hex(content), "pinned": bool(pinned)})

    def _record_line(self, row: dict[str, Any], digests: dict[str, str | None]) -> bytes:
        fields = {
            "source": self._numbers.of(row["source"]), "target": self._numbers.of(row["target"]),
            "key": row["key"].hex(), "effect": row["effect"], "seconds": row["seconds"],
            "recorded_at": row["recorded_at"], "reproducible": bool(row["reproducible"]),
            "age_s": row["age_s"], **digests,
        }  # fmt: skip
        # Left out where nothing is known, so that earlier versions read such a file too.
        fields |= {name: row[name] for name in ResourceUse._fields if row[name] is not None}
        return orjson.dumps(fields)

    def _batch(self, lines: list[bytes]) -> bytes:
        return self._writer.part("batch", b"\n".join(lines))

    def _blob(self, blob: int) -> tuple[str | None, list[bytes]]:
        """Return a blob's digest, None for number 0; and its part, unless it was sent before."""
        if not blob:
            return None, []
        was_sent = self._mark_sent(blob)
        columns = "digest" if was_sent else "digest, packed, data"
        row = self._connection.execute(f"SELECT {columns} FROM blobs WHERE id = ?", (blob,)).fetchone()
        if row is None:
            raise StoreError(f"blob {blob} is not in the store: another program damaged or changed the file.")
        if was_sent:
            return row[0].hex(), []
        return row[0].hex(), [self._writer.part("zblob" if row[1] else "blob", bytes(row[2]), row[0])]

    def _mark_sent(self, blob: int) -> bool:
        """Mark a blob as sent, and return whether it was before. One bit for each blob that the store ever had."""
        byte, bit = blob >> 3, 1 << (blob & 7)
        if byte >= len(self._sent):
            self._sent.extend(bytes(byte + 1 - len(self._sent)))
        was_sent = bool(self._sent[byte] & bit)
        self._sent[byte] |= bit
        return was_sent


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else bytes(digest).hex()
