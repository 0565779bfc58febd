"""The one JSON object that every tool of the sql endpoint answers with (pure).

`{"columns", "rows", "row_count", "truncated", "error"}`; `types` beside `columns` where the engine knows them, `text`
in place of `rows` where a format was asked for; `compare` has members of its own. How long it took is never in it:
equal answers are equal bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sandboxes.sql.compare import Row, judge
from sandboxes.sql.encoder import json_bytes
from sandboxes.sql.render import RENDERERS
from sandboxes.sql.values import Value

MAX_ROWS = 1 << 40
"""Where bytes alone are the limit."""

ErrorKind = Literal["sql", "timeout", "limit", "refused"]
"""Why there is an error: the engine says so, the time was up, a limit was met, or it is never allowed here."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What the agent is told of a statement that did not do. code: the engine's own (SQLSTATE, `SQLITE_CONSTRAINT`)."""

    message: str
    kind: ErrorKind = "sql"
    code: str | None = None

    def to_json(self) -> dict[str, str]:
        told = {"message": self.message, "kind": self.kind}
        return told if self.code is None else told | {"code": self.code}


@dataclass(slots=True)
class RowCollector:
    """Takes rows until a limit is met. max_rows, output_bytes: as in the call and in the spec's limits."""

    max_rows: int
    output_bytes: int
    rows: list[list[Value]] = field(default_factory=list)
    truncated: bool = False
    _bytes: int = 0

    def take(self, row: list[Value]) -> bool:
        """Add row; False, and it is left out, where there is no more room: nothing more needs to be fetched."""
        if len(self.rows) >= self.max_rows:
            self.truncated = True
            return False
        self._bytes += len(json_bytes(row)) + 1
        if self._bytes > self.output_bytes:
            self.truncated = True
            return False
        self.rows.append(row)
        return True

    def take_all(self, rows: Iterable[list[Value]]) -> "RowCollector":
        for row in rows:
            if not self.take(row):
                break
        return self


def success(
    columns: Sequence[str],
    taken: RowCollector,
    *,
    shape: str = "json",
    types: Sequence[str] | None = None,
    changed: int | None = None,
) -> bytes:
    """Return the answer of a statement that did. changed: rows that one without result columns changed."""
    told: dict[str, Any] = {"columns": list(columns)}
    if types is not None:
        told["types"] = list(types)
    truncated = taken.truncated
    if shape == "json":
        told["rows"] = taken.rows
    else:
        text = RENDERERS[shape](columns, taken.rows) if columns else ""
        # Aligned columns are wider than their values.
        told["text"], cut = _cut(text, taken.output_bytes)
        truncated = truncated or cut
    told["row_count"] = len(taken.rows) if columns or changed is None else changed
    return json_bytes(told | {"truncated": truncated, "error": None})


def failure(error: Failure, *, shape: str = "json", sql: str = "") -> bytes:
    """Return the answer of a statement that did not. sql: the statement, which SkyRL's text of a timeout repeats."""
    told: dict[str, Any] = {"columns": []}
    if shape == "json":
        told["rows"] = []
    elif shape == "skyrl" and error.kind == "timeout":
        told["text"] = f"SQL Timeout:\n{sql}"
    else:
        told["text"] = f"Error executing SQL: {error.message}"
    return json_bytes(told | {"row_count": 0, "truncated": False, "error": error.to_json()})


def comparison(rows: Mapping[str, Sequence[Row]], errors: Mapping[str, Failure | None], *, ordered: bool) -> bytes:
    """Return the answer of `compare`; rows and errors are those of its members `sql` and `gold`."""
    for name in ("sql", "gold"):
        failure = errors[name]
        if failure is not None:
            return other({"match": False, "why": f"{name} fails", "error": failure.to_json() | {"of": name}})
    return other(judge(rows["sql"], rows["gold"], ordered=ordered))


def other(members: dict[str, Any]) -> bytes:
    """Return an answer that is no table (`compare`), with the member `error` that all have."""
    return json_bytes({"error": None} | members)


def _cut(text: str, most: int) -> tuple[str, bool]:
    data = text.encode(errors="surrogatepass")
    if len(data) <= most:
        return text, False
    return data[:most].decode(errors="ignore"), True
