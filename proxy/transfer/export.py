"""A task's tree as a bundle: read from the store in one go, beside the event loop, in constant memory."""

import sqlite3
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import orjson

from proxy.storage.errors import StoreError
from proxy.transfer.format import FORMAT, Writer
from proxy.transfer.state_records import ExportedStates
from proxy.tree.keys import KEY_VERSION
from proxy.tree.tree import Tree

_BATCH = 1000
_SENT_BYTES = 256 << 10


def export(
    connection: sqlite3.Connection, task: str, tree: Tree, states: ExportedStates, *, current: bool
) -> Iterator[bytes]:
    """Yield the bytes of a tree's bundle. Blocking, for a thread; the connection is closed at the end.

    current: whether it is the tree of task's own spec.

    Left out: what no other rollout may be answered from (private records), and states that were set aside.

    Raises:
        StoreError: the store's records are not in the order in which they were made.
    """
    try:
        # One moment of the store, whatever is recorded meanwhile.
        connection.execute("BEGIN")
        pending = bytearray()
        for piece in _Export(connection, task, tree, states, current=current).pieces():
            pending += piece
            if len(pending) >= _SENT_BYTES:
                yield bytes(pending)
                pending.clear()
        yield bytes(pending)
    finally:
        connection.close()


@dataclass(slots=True)
class _Numbers:
    """Which nodes are in the bundle, by their ids, which ascend: a node's number is its position."""

    ids: "array[int]" = field(default_factory=lambda: array("q"))

    def of(self, node: int) -> int | None:
        at = bisect_left(self.ids, node)
        return at if at < len(self.ids) and self.ids[at] == node else None

    def add(self, node: int) -> int:
        if self.ids and self.ids[-1] >= node:
            raise StoreError(f"node n{node} was recorded out of order: this tree cannot be exported")
        self.ids.append(node)
        return len(self.ids) - 1


class _Export:
    def __init__(
        self, connection: sqlite3.Connection, task: str, tree: Tree, states: ExportedStates, *, current: bool
    ) -> None:
        self._connection, self._task, self._tree, self._states = connection, task, tree, states
        self._current = current
        self._writer, self._numbers = Writer(), _Numbers()
        self._sent = bytearray()

    def pieces(self) -> Iterator[bytes]:
        # Counted before anything is sent: the manifest comes first, and says how much follows.
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
        lines = [self._node(self._tree.root.id)]
        for row, fresh in self._chosen():
            if fresh:
                lines.append(self._node(row["target"]))
            digests = {}
            for member in ("call", "upload", "answer"):
                digest, sent = self._blob(row[member])
                digests[member] = digest
                yield from sent
            lines.append(self._record(row, digests))
            if len(lines) >= _BATCH:
                yield self._batch(lines)
                lines = []
        if lines:
            yield self._batch(lines)
        yield from self._states.parts(self._writer, self._numbers.of)
        yield self._writer.seal()

    def _count(self) -> tuple[int, int]:
        self._numbers.add(self._tree.root.id)
        records = sum(1 for _ in self._chosen())
        return len(self._numbers.ids), records

    def _chosen(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the records that travel, in order, and whether each is the first to reach its target."""
        sql = (
            "SELECT r.source, r.key, r.target, r.call, r.upload, r.answer, r.effect, r.seconds, r.recorded_at, "
            "r.reproducible FROM records r JOIN nodes n ON n.id = r.target JOIN nodes m ON m.id = r.source "
            "WHERE r.tree = ? AND r.private = 0 AND n.diverged = '' AND m.diverged = '' "
            "AND r.id NOT IN (SELECT record FROM findings) ORDER BY r.id"
        )
        cursor = self._connection.execute(sql, (self._tree.id,))
        names = [column[0] for column in cursor.description]
        for values in cursor:
            row = dict(zip(names, values, strict=True))
            if self._numbers.of(row["source"]) is None:
                continue
            fresh = self._numbers.of(row["target"]) is None
            if fresh and self._numbers.ids[-1] >= row["target"]:
                # What first led there does not travel, so neither does this.
                continue
            if fresh:
                self._numbers.add(row["target"])
            yield row, fresh

    def _node(self, node: int) -> bytes:
        exact, content, pinned = self._connection.execute(
            "SELECT exact, content, pinned FROM nodes WHERE id = ?", (node,)
        ).fetchone()
        told = {"node": self._numbers.of(node), "exact": _hex(exact), "content": _hex(content), "pinned": bool(pinned)}
        return orjson.dumps(told)

    def _record(self, row: dict[str, Any], digests: dict[str, str | None]) -> bytes:
        told = {
            "source": self._numbers.of(row["source"]), "target": self._numbers.of(row["target"]),
            "key": row["key"].hex(), "effect": row["effect"], "seconds": row["seconds"],
            "recorded_at": row["recorded_at"], "reproducible": bool(row["reproducible"]), **digests,
        }  # fmt: skip
        return orjson.dumps(told)

    def _batch(self, lines: list[bytes]) -> bytes:
        return self._writer.part("batch", b"\n".join(lines))

    def _blob(self, blob: int) -> tuple[str | None, list[bytes]]:
        """Return a blob's digest, and its part if it was not sent before."""
        if not blob:
            return None, []
        sent = self._was_sent(blob)
        columns = "digest" if sent else "digest, packed, data"
        row = self._connection.execute(f"SELECT {columns} FROM blobs WHERE id = ?", (blob,)).fetchone()
        if row is None:
            raise StoreError(f"blob {blob} is not in the store: it was damaged or changed from outside")
        if sent:
            return row[0].hex(), []
        return row[0].hex(), [self._writer.part("zblob" if row[1] else "blob", bytes(row[2]), row[0])]

    def _was_sent(self, blob: int) -> bool:
        """Say whether a blob was sent, and note that it is: a bit for each that the store ever had."""
        at, bit = blob >> 3, 1 << (blob & 7)
        if at >= len(self._sent):
            self._sent.extend(bytes(at + 1 - len(self._sent)))
        known = bool(self._sent[at] & bit)
        self._sent[at] |= bit
        return known


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else bytes(digest).hex()
