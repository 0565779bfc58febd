"""Whether a bundle may be imported: all of it is looked at before anything is written."""

import re
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from proxy.dialects import DIALECTS
from proxy.transfer.format import BundleError, Part, read
from proxy.transfer.schema import Manifest, NodeLine, RecordLine, lines_of, manifest_of
from proxy.transfer.state_records import BundleStates
from proxy.tree.keys import CallKey, UncanonicalArgumentsError, again_key, call_key
from sandboxes.calls import ToolCall

_FORGOTTEN = 100
"""How many of the times that a call was asked before, at one state, may be missing."""
_NAME, _VALUE = re.compile(r"[!-9;-~]{1,200}"), re.compile(r"[\t\x20-\x7e\x80-\xff]{0,65536}")
"""Of headers, as they may go over the wire."""


def check(file: BinaryIO, scratch: Path) -> tuple[Manifest, BundleStates]:
    """Read a whole bundle and check it: digests, structure, calls and keys. Blocking, for a thread; constant memory.

    Return what it says of itself, and what was seen of its kept states.

    scratch: a file for what is too much to remember; it does not exist yet, and does not afterwards.

    Raises:
        BundleError: something is wrong, and what; nothing was changed anywhere.
    """
    connection = sqlite3.connect(scratch)
    try:
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        return _Check(connection).run(file)
    finally:
        connection.close()
        scratch.unlink(missing_ok=True)


class _Check:
    """Nodes are numbered as they come, and only what came before may be spoken of: so there is no cycle, and no end
    that hangs loose, in what passes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._ask = connection.execute
        self._ask("CREATE TABLE blobs (digest TEXT PRIMARY KEY, call INTEGER, key BLOB, answer INTEGER) WITHOUT ROWID")
        self._ask("CREATE TABLE seen (source INTEGER, key TEXT, PRIMARY KEY (source, key)) WITHOUT ROWID")
        self._ask("CREATE TABLE nodes (number INTEGER PRIMARY KEY, content TEXT)")
        self._nodes = self._records = 0
        self._states = BundleStates()
        self._unreached: int | None = None
        self._databases: frozenset[str] = frozenset()

    def run(self, file: BinaryIO) -> tuple[Manifest, BundleStates]:
        manifest: Manifest | None = None
        for part in read(file):
            match part.kind:
                case "manifest":
                    manifest = manifest_of(part)
                    self._databases = frozenset(manifest.spec.databases)
                case "blob" | "zblob":
                    self._blob(part)
                case "batch":
                    self._batch(part)
                case "seal":
                    pass
                case _:
                    self._states.add(part, self._content)
        assert manifest is not None  # or `read` has raised
        if self._unreached is not None:
            raise BundleError(f"no call leads to node {self._unreached}.")
        if (self._nodes, self._records) != (manifest.nodes, manifest.records):
            raise BundleError(
                f"it holds {self._nodes} nodes and {self._records} calls, and its manifest says {manifest.nodes} and "
                f"{manifest.records}."
            )
        if len(self._states.units_of_state) > manifest.snapshots:
            raise BundleError(f"it holds more kept states than the {manifest.snapshots} that its manifest says.")
        return manifest, self._states

    def _content(self, node: int) -> str | None:
        """Return the digest of a node that came before, None where it has none.

        Raises:
            BundleError: there is no such node.
        """
        row = self._ask("SELECT content FROM nodes WHERE number = ?", (node,)).fetchone()
        if row is None or node == self._unreached:
            raise BundleError(f"there is a kept state of node {node}, and no such node.")
        content: str | None = row[0]
        return content

    def _blob(self, part: Part) -> None:
        call, key = _call(part.data, self._databases)
        values = (part.digest.hex(), call, key, _is_answer(part.data))
        self._ask("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", values)

    def _batch(self, part: Part) -> None:
        for line in lines_of(part):
            if isinstance(line, NodeLine):
                self._node(line, part.name)
            else:
                self._record(line, part.name)

    def _node(self, line: NodeLine, where: str) -> None:
        if line.node != self._nodes or self._unreached is not None:
            raise BundleError(f"{where}: node {line.node} does not follow the one before it and its call.")
        if line.exact is not None and line.content is None:
            raise BundleError(f"{where}: node {line.node} has half a digest.")
        self._ask("INSERT INTO nodes VALUES (?, ?)", (line.node, line.content))
        self._nodes += 1
        if line.node:
            self._unreached = line.node

    def _record(self, line: RecordLine, where: str) -> None:
        told = f"{where}: a call at node {line.source} that leads to node {line.target}"
        if line.source >= self._nodes or line.target >= self._nodes or line.source == self._unreached:
            raise BundleError(f"{told}: one of them does not exist, or comes from the other: the tree has a cycle.")
        if (line.source == line.target) != (line.effect == 0):
            raise BundleError(f"{told}: its effect says otherwise.")
        if self._unreached is not None and line.target != self._unreached:
            raise BundleError(f"{told}: no call leads to node {self._unreached}.")
        self._unreached = None
        self._records += 1
        try:
            self._ask("INSERT INTO seen VALUES (?, ?)", (line.source, line.key))
        except sqlite3.IntegrityError:
            raise BundleError(f"{told}: the same call is there twice.") from None
        self._blobs_of(line, told)

    def _blobs_of(self, line: RecordLine, told: str) -> None:
        call = self._known(line.call)
        answer = self._known(line.answer)
        if call is None or answer is None or (line.upload is not None and self._known(line.upload) is None):
            raise BundleError(f"{told}: what it was, or was answered, is not in the file.")
        if not call[0] or not answer[2]:
            raise BundleError(f"{told}: what it was, or was answered, cannot be read.")
        if line.upload is None and call[1] is not None and not self._has_key(line, CallKey(call[1])):
            raise BundleError(f"{told}: its key is not that of its call.")

    def _has_key(self, line: RecordLine, key: CallKey) -> bool:
        """Whether a call has the key that follows from it, or one of those that it has when it is asked again."""
        told = CallKey(bytes.fromhex(line.key))
        if told == key:
            return True
        (calls,) = self._ask("SELECT COUNT(*) FROM seen WHERE source = ?", (line.source,)).fetchone()
        return told in (again_key(key, nth) for nth in range(1, calls + _FORGOTTEN))

    def _known(self, digest: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._ask(
            "SELECT call, key, answer FROM blobs WHERE digest = ?", (digest,)
        ).fetchone()
        return row


def _call(data: bytes, databases: Collection[str]) -> tuple[bool, bytes | None]:
    """Say whether a blob is a call, and return its key where that follows from it alone."""
    if not data.startswith(b"{"):
        return False, None
    try:
        value = orjson.loads(data)
        if not isinstance(value, dict):
            return False, None
        endpoint, tool, arguments = value["endpoint"], value["tool"], value["arguments"]
        if not (isinstance(endpoint, str) and isinstance(tool, str) and isinstance(arguments, dict)):
            return False, None
        if not _can_be_run(endpoint, tool, arguments, databases):
            return False, None
        key = call_key(ToolCall(endpoint, tool, arguments)) if endpoint in DIALECTS else None
    except (orjson.JSONDecodeError, KeyError, UncanonicalArgumentsError):
        return False, None
    return True, key


def _can_be_run(endpoint: str, tool: str, arguments: dict[str, Any], databases: Collection[str]) -> bool:
    """Say whether a call of a built-in endpoint has what its replay needs."""
    if endpoint == "sql":
        return arguments.get("database") in databases and isinstance(arguments.get("timeout_s"), int | float)
    if endpoint != "shell":
        return True
    texts = ("command", "session") if tool == "exec" else ("path",)
    timed = isinstance(arguments.get("timeout_s", 1), int | float)
    return tool in ("exec", "put", "get", "delete") and timed and all(isinstance(arguments.get(t), str) for t in texts)


def _is_answer(data: bytes) -> bool:
    """Say whether a blob is an answer: a status, a media type or headers, and a body."""
    head, line, _ = data[: 1 << 20].partition(b"\n")
    status, _, told = head.partition(b" ")
    if not line or not status.isdigit() or not 100 <= int(status[:4]) <= 599:
        return False
    try:
        if not told.startswith(b"["):
            return told.isascii() and told.decode().isprintable() and len(told) < 1000
        return all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in orjson.loads(told))
    except (orjson.JSONDecodeError, ValueError, TypeError):
        return False
