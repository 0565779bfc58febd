"""The JSON object that every tool of the sql endpoint returns (pure).

Its members are `columns`, `rows`, `row_count`, `truncated` and `error`; `types` follows `columns` where known, and
`text` replaces `rows` in a text format. `compare` has members of its own. No member depends on the duration of a call.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sandboxes.calls import Mark
from sandboxes.sql.compare import Row, judge
from sandboxes.sql.render import RENDERERS
from sandboxes.sql.values import Value

MAX_ROWS = 1 << 40
"""A row limit that is never reached, for calls that only `output_bytes` limits."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""The standard library's, because proxy, workers and guest must answer with equal bytes, and the guest has no other.
NaN and infinities never get this far: `sandboxes.sql.values.encode` tags them."""

ErrorKind = Literal["sql", "timeout", "limit", "refused"]
"""Why a statement failed: an error of the engine, its time limit, another limit, or a rule that forbids it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a statement, as the agent reads it."""

    message: str
    kind: ErrorKind = "sql"
    code: str | None = None  # The engine's own (an SQLSTATE, or a name such as `SQLITE_CONSTRAINT`), if it has one.

    def to_json(self) -> dict[str, str]:
        """Return the member `error` of a result."""
        fields = {"message": self.message, "kind": self.kind}
        return fields if self.code is None else fields | {"code": self.code}


def json_bytes(value: Any) -> bytes:
    r"""Encode a result as compact UTF-8 JSON. Lone surrogates, which UTF-8 lacks, become escapes such as `\ud800`."""
    # Python's escape of a surrogate (a backslash, "u" and four hexadecimal digits) is also the one of JSON.
    return _ENCODER.encode(value).encode(errors="backslashreplace")


@dataclass(slots=True)
class RowCollector:
    """Collects the rows of a result up to its limits."""

    max_rows: int  # From the call.
    output_bytes: int  # Limit of the rows' JSON, from the spec.
    rows: list[list[Value]] = field(default_factory=list)
    truncated: bool = False  # A row was left out because a limit was reached.
    _bytes: int = 0

    def add(self, row: list[Value]) -> bool:
        """Add a row if it fits. False says that it was left out: the caller need not fetch more rows."""
        if len(self.rows) >= self.max_rows:
            self.truncated = True
            return False
        # One byte more for the comma between two rows.
        self._bytes += len(json_bytes(row)) + 1
        if self._bytes > self.output_bytes:
            self.truncated = True
            return False
        self.rows.append(row)
        return True

    def add_all(self, rows: Iterable[list[Value]]) -> "RowCollector":
        """Add rows until one does not fit, and return the collector."""
        for row in rows:
            if not self.add(row):
                break
        return self


def success(
    columns: Sequence[str],
    collector: RowCollector,
    *,
    shape: str = "json",
    types: Sequence[str] | None = None,
    changed: int | None = None,
) -> bytes:
    """Encode the result of a statement that succeeded, as "json" or in a text format of `RENDERERS`."""
    members: dict[str, Any] = {"columns": list(columns)}
    if types is not None:
        members["types"] = list(types)
    truncated = collector.truncated
    if shape == "json":
        members["rows"] = collector.rows
    else:
        text = RENDERERS[shape](columns, collector.rows) if columns else ""
        # The collector measured JSON. Aligned columns can be much longer than their values.
        members["text"], cut = _cut(text, collector.output_bytes)
        truncated = truncated or cut
    members["row_count"] = len(collector.rows) if columns or changed is None else changed
    return json_bytes(members | {"truncated": truncated, "error": None})


def failure(error: Failure, *, shape: str = "json", sql: str = "") -> bytes:
    """Encode the result of a statement that failed. SkyRL-SQL's text of a timeout repeats the statement."""
    members: dict[str, Any] = {"columns": []}
    if shape == "json":
        members["rows"] = []
    elif shape == "skyrl" and error.kind == "timeout":
        members["text"] = f"SQL Timeout:\n{sql}"
    else:
        members["text"] = f"Error executing SQL: {error.message}"
    return json_bytes(members | {"row_count": 0, "truncated": False, "error": error.to_json()})


def comparison(rows: Mapping[str, Sequence[Row]], errors: Mapping[str, Failure | None], *, ordered: bool) -> bytes:
    """Encode the result of `compare` for the queries `sql` and `gold`; after an error no rows are read."""
    for name in ("sql", "gold"):
        failure = errors[name]
        if failure is not None:
            return other({"match": False, "why": f"{name} fails", "error": failure.to_json() | {"of": name}})
    return other(judge(rows["sql"], rows["gold"], ordered=ordered))


def other(members: dict[str, Any]) -> bytes:
    """Encode a result that is not a table (`compare`), with the member `error` that all results have."""
    return json_bytes({"error": None} | members)


def marks_of(result: bytes) -> tuple[Mark, ...]:
    """Return the marks of a result. Its last members are this module's, whatever the rows are."""
    if result.endswith(b'"error":null}'):
        return ("output",) if result.endswith(b'"truncated":true,"error":null}') else ()
    error = json.loads(result)["error"] or {}
    match error.get("kind"):
        case "timeout":
            return ("timeout",)
        case "limit" if error.get("code") == "SQLITE_FULL" or "limits.disk_mb" in error["message"]:
            return ("disk",)
        case "limit" if "memory" in error["message"]:
            return ("memory",)
    return ()


def _cut(text: str, max_bytes: int) -> tuple[str, bool]:
    data = text.encode(errors="surrogatepass")
    if len(data) <= max_bytes:
        return text, False
    return data[:max_bytes].decode(errors="ignore"), True
