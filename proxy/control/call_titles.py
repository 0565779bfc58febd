"""Titles: each call in one line, with its exit code, for lists of thousands of nodes."""

import sqlite3
from typing import NamedTuple

import orjson

from proxy.dialects.shell import exit_code
from proxy.http.lru_cache import LruCache
from proxy.storage.blobs import blob_of
from proxy.storage.records import RecordStore
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall

TITLE_CHARS = 200
"""Longest title in a list, in characters."""
_REMEMBERED = 200_000
"""Titles kept in memory, at most some 60 MB: the page shows trees of 50,000 nodes."""


def title(call: ToolCall) -> str:
    """Return a call as text: the command or SQL statement itself, or else the tool and its arguments."""
    for endpoint, member in (("shell", "command"), ("sql", "sql")):
        text = call.arguments.get(member)
        if call.endpoint == endpoint and isinstance(text, str):
            service = call.arguments.get("service")
            return f"{service}: {text}" if service else text
    if call.endpoint == "harness" and "said" in call.arguments:
        return f"model: {call.arguments['said']}"
    if "target" in call.arguments and "headers" in call.arguments:
        # A request to a tool server: what it says is in its body, and its headers are nearly always the same.
        body = call.body[:TITLE_CHARS].decode(errors="replace")
        return f"{call.arguments.get('method', '')} {call.endpoint}{call.arguments['target']} {body}".strip()
    arguments = orjson.dumps(call.arguments).decode() if call.arguments else ""
    return f"{call.endpoint}/{call.tool} {arguments}".rstrip()


def stored_title(connection: sqlite3.Connection, call: int, upload: int = 0) -> str | None:
    """Return the title of a call by the numbers of its blobs; None if one of them is damaged."""
    made, body = blob_of(connection, call), blob_of(connection, upload) if upload else b""
    if made is None or body is None:
        return None
    value = orjson.loads(made)
    return title(ToolCall(value["endpoint"], value["tool"], value["arguments"], body))[:TITLE_CHARS]


class Title(NamedTuple):
    """A call in one line."""

    text: str  # Cut to `TITLE_CHARS`.
    exit_code: int | None  # The exit code in its answer; None if the answer has none.


class Titles:
    """Titles of records, read from the store once."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records
        self._known = LruCache[int, Title](_REMEMBERED)

    def of(self, record: Record) -> Title:
        """Return a record's title."""
        known = self._known.get(record.id)
        if known is None:
            call, result = self._records.call(record), self._records.result(record)
            known = Title(title(call)[:TITLE_CHARS], exit_code(result))
            self._known[record.id] = known
        return known
