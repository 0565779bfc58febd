"""Checks a whole bundle before anything of it is written.

The lines of a bundle number its nodes as they come, and a line may name only what came before:

1. Each node but the root is followed directly by the record that leads to it first. Every node is therefore reachable
   from the root, and the tree has no cycle.
2. A record without an effect leads to its own node, and one node has no key twice. A record with an effect may lead
   to its own node too: writing the same bytes again changes a file's time and reaches the same state.
3. Every blob that a record names is in the file, and can be read as a call or as an answer.
4. A record's key follows from its call, so a false file cannot answer a call with another call's answer.

What is known of nodes and blobs lies in a scratch SQLite file, because it may be larger than memory.
"""

import re
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from proxy.dialects import DIALECTS
from proxy.dialects.arguments import can_run
from proxy.dialects.builtin_tools import ARGUMENTS
from proxy.transfer.format import BundleError, Part, read
from proxy.transfer.schema import BundleManifest, NodeLine, RecordLine, lines_of, manifest_of
from proxy.transfer.state_records import BundleStates
from proxy.tree.keys import CallKey, UncanonicalArgumentsError, again_key, call_key
from sandboxes.calls import ToolCall, in_order

_MISSING_POLLS = 100_000
"""How many polls may be missing from a file, because audits quarantined their records or they were forgotten. The n-th
poll of a call has a key of its own, which the check derives from the call. A false key costs so many derivations before
the file is refused."""
_DERIVED_POLLS = 16
"""How many keys of polls are derived at once; most calls of a node have fewer polls."""
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[!-9;-~]{1,200}"), re.compile(r"[\t\x20-\x7e\x80-\xff]{0,65536}")


def check(file: BinaryIO, scratch: Path) -> tuple[BundleManifest, BundleStates]:
    """Read and check a whole bundle, in constant memory; the scratch file is removed. Blocking. Raises BundleError."""
    connection = sqlite3.connect(scratch)
    try:
        # The file is thrown away in any case, so nothing has to survive a crash.
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        return _BundleCheck(connection).run(file)
    finally:
        connection.close()
        scratch.unlink(missing_ok=True)


class _BundleCheck:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._execute(
            "CREATE TABLE blobs (digest TEXT PRIMARY KEY, call INTEGER, key BLOB, answer INTEGER) WITHOUT ROWID"
        )
        self._execute("CREATE TABLE seen (source INTEGER, key TEXT, PRIMARY KEY (source, key)) WITHOUT ROWID")
        # The keys that polls of a call have at a node. Each is derived once: trying all of them for each record would
        # take quadratic time.
        self._execute(
            "CREATE TABLE polls (source INTEGER, call BLOB, key TEXT, PRIMARY KEY (source, call, key)) WITHOUT ROWID"
        )
        self._execute("CREATE TABLE derived (source INTEGER, call BLOB, polls INTEGER, PRIMARY KEY (source, call))")
        self._derivations = 0
        self._execute("CREATE TABLE nodes (number INTEGER PRIMARY KEY, content TEXT)")
        self._nodes = self._records = 0
        self._states = BundleStates()
        # The last node, until the record that leads to it has come.
        self._unreached: int | None = None
        self._databases: frozenset[str] = frozenset()

    def run(self, file: BinaryIO) -> tuple[BundleManifest, BundleStates]:
        manifest: BundleManifest | None = None
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
        self._states.finish()
        assert manifest is not None  # `read` yields it first
        if self._unreached is not None:
            raise BundleError(f"no call leads to node {self._unreached}.")
        if (self._nodes, self._records) != (manifest.nodes, manifest.records):
            raise BundleError(
                f"it holds {self._nodes} nodes and {self._records} calls, and its manifest states {manifest.nodes} and "
                f"{manifest.records}."
            )
        if len(self._states.units_of_state) > manifest.snapshots:
            raise BundleError(f"it holds more snapshots than the {manifest.snapshots} that its manifest states.")
        return manifest, self._states

    def _content(self, node: int) -> str | None:
        """Return a node's content digest as hex, None without one. Raises BundleError if no node came before."""
        row = self._execute("SELECT content FROM nodes WHERE number = ?", (node,)).fetchone()
        if row is None or node == self._unreached:
            raise BundleError(f"there is a snapshot of node {node}, and no such node.")
        content: str | None = row[0]
        return content

    def _blob(self, part: Part) -> None:
        is_call, key = _parse_call(part.data, self._databases)
        values = (part.digest.hex(), is_call, key, _is_answer(part.data))
        self._execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", values)

    def _batch(self, part: Part) -> None:
        for line in lines_of(part):
            if isinstance(line, NodeLine):
                self._node(line, part.name)
            else:
                self._record(line, part.name)

    def _node(self, line: NodeLine, part: str) -> None:
        if line.node != self._nodes or self._unreached is not None:
            raise BundleError(f"{part}: node {line.node} does not follow the node before it and that node's call.")
        if line.exact is not None and line.content is None:
            raise BundleError(f"{part}: node {line.node} has an exact digest without a content digest.")
        # Without an exact digest, the content digest is a witness of other things than a snapshot's digest.
        digest = line.content if line.exact is not None else None
        self._execute("INSERT INTO nodes VALUES (?, ?)", (line.node, digest))
        self._nodes += 1
        if line.node:
            self._unreached = line.node

    def _record(self, line: RecordLine, part: str) -> None:
        subject = f"{part}: a call at node {line.source} that leads to node {line.target}"
        if line.source >= self._nodes or line.target >= self._nodes or line.source == self._unreached:
            raise BundleError(f"{subject}: one of them does not exist, or comes from the other: the tree has a cycle.")
        if line.source != line.target and line.effect == 0:
            raise BundleError(f"{subject}: its effect contradicts this.")
        if self._unreached is not None and line.target != self._unreached:
            raise BundleError(f"{subject}: no call leads to node {self._unreached}.")
        self._unreached = None
        self._records += 1
        try:
            self._execute("INSERT INTO seen VALUES (?, ?)", (line.source, line.key))
        except sqlite3.IntegrityError:
            raise BundleError(f"{subject}: the file holds this call twice.") from None
        self._check_blobs(line, subject)

    def _check_blobs(self, line: RecordLine, subject: str) -> None:
        call = self._known(line.call)
        answer = self._known(line.answer)
        if call is None or answer is None or (line.upload is not None and self._known(line.upload) is None):
            raise BundleError(f"{subject}: its call, upload or answer is not in the file.")
        if not call[0] or not answer[2]:
            raise BundleError(f"{subject}: its call or answer cannot be read.")
        if line.upload is None and call[1] is not None and not self._has_key(line, CallKey(call[1])):
            raise BundleError(f"{subject}: its key is not that of its call.")

    def _has_key(self, line: RecordLine, key: CallKey) -> bool:
        """Return whether a record has the key of its call, or that of one of its repeated polls."""
        if line.key == key.hex():
            return True
        is_poll = "SELECT 1 FROM polls WHERE source = ? AND call = ? AND key = ?"
        while not self._execute(is_poll, (line.source, key, line.key)).fetchone():
            # Each record of a poll needs one derivation, which it may have caused; the rest is for missing records.
            if self._derivations > _MISSING_POLLS + _DERIVED_POLLS * self._records:
                return False
            self._derive_polls(line.source, key)
        return True

    def _derive_polls(self, source: int, key: CallKey) -> None:
        row = self._execute("SELECT polls FROM derived WHERE source = ? AND call = ?", (source, key)).fetchone()
        known = 0 if row is None else int(row[0])
        for nth in range(known + 1, known + _DERIVED_POLLS + 1):
            self._execute("INSERT INTO polls VALUES (?, ?, ?)", (source, key, again_key(key, nth).hex()))
        self._execute("INSERT OR REPLACE INTO derived VALUES (?, ?, ?)", (source, key, known + _DERIVED_POLLS))
        self._derivations += _DERIVED_POLLS

    def _known(self, digest: str) -> tuple[Any, ...] | None:
        """Return whether a blob is a call, the key of that call, and whether it is an answer; None for no blob."""
        sql = "SELECT call, key, answer FROM blobs WHERE digest = ?"
        row: tuple[Any, ...] | None = self._execute(sql, (digest,)).fetchone()
        return row


def _parse_call(data: bytes, databases: Collection[str]) -> tuple[bool, bytes | None]:
    """Return whether a blob is a call that can run, and its key if the key follows from the call alone."""
    if not data.startswith(b"{"):
        return False, None
    try:
        value = orjson.loads(data)
        if not isinstance(value, dict):
            return False, None
        endpoint, tool, arguments = value["endpoint"], value["tool"], value["arguments"]
        if not (isinstance(endpoint, str) and isinstance(tool, str) and isinstance(arguments, dict)):
            return False, None
        if not _can_run(endpoint, tool, arguments, databases):
            return False, None
        # The key of a rule-based endpoint depends on the rules, which may ignore parts of the call.
        key = call_key(ToolCall(endpoint, tool, arguments)) if endpoint in DIALECTS else None
    except (orjson.JSONDecodeError, KeyError, UncanonicalArgumentsError):
        return False, None
    return True, key


def _can_run(endpoint: str, tool: str, arguments: dict[str, Any], databases: Collection[str]) -> bool:
    """Return whether a call of a built-in endpoint has the arguments that its replay needs."""
    tools = ARGUMENTS.get(endpoint)
    if tools is None:
        return True
    known = endpoint != "sql" or arguments.get("database") in databases
    return known and tool in tools and can_run(tools[tool], arguments)


def _is_answer(data: bytes) -> bool:
    """Return whether a blob is an answer: a line with status and media type or headers, then a body."""
    head, line_end, _ = data[: 1 << 20].partition(b"\n")
    first, _, kind = head.partition(b" ")
    status, separator, marks = first.partition(b";")
    names = tuple(marks.decode(errors="replace").split(",")) if separator else ()
    if not line_end or not status.isdigit() or not 100 <= int(status[:4]) <= 599 or names != in_order(names):
        return False
    try:
        if not kind.startswith(b"["):
            return kind.isascii() and kind.decode().isprintable() and len(kind) < 1000
        headers = orjson.loads(kind)
        return all(_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value) for name, value in headers)
    except (orjson.JSONDecodeError, ValueError, TypeError):
        return False
