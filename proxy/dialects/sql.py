"""The sql endpoint: `POST query|script|explain|compare`, `GET|POST tables|schema` (pure)."""

from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import BeforeValidator, Field, WithJsonSchema

from proxy.dialects.arguments import BuiltInTool, ToolArguments, checked_arguments
from proxy.dialects.base import json_object
from proxy.dialects.sql_normalize import canonical_statement
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec

MAX_STATEMENT_BYTES = 4 << 20
"""Limits a statement or a script; larger data is inserted by several calls."""
MAX_ROWS = 100_000
"""Limits the rows of a result that a client may ask for."""

Scalar = str | int | float | bool | None


def _scalars(params: Any) -> Any:
    """Refuse the first value that no placeholder takes: the library would describe each of a million."""
    values = params.values() if isinstance(params, dict) else params if isinstance(params, list) else ()
    if not all(value is None or isinstance(value, str | int | float | dict) for value in values):
        raise ValueError("a value for a placeholder is a string, a number, true, false, null or an object")
    return params


_VALUES = {"type": ["array", "object"], "description": "values for the statement's placeholders"}
Params = Annotated[
    list[Scalar | dict[str, str]] | dict[str, Scalar | dict[str, str]] | None, BeforeValidator(_scalars),
    WithJsonSchema(_VALUES),
]  # fmt: skip
ResultFormat = Literal["json", "table", "markdown", "csv", "skyrl"]


class _SqlArguments(ToolArguments):
    database: str | None = Field(default=None, description="by its name in the task; the first by default")


class _Timed(_SqlArguments):
    timeout_s: float = Field(default=5.0, gt=0, le=3600)


class _Statement(_Timed):
    sql: str


class _Query(_Statement):
    params: Params = None
    max_rows: int = Field(default=100, ge=0, le=MAX_ROWS)
    format: ResultFormat = "json"


class _Compare(_Statement):
    gold: str
    ordered: bool = False


class _Explain(_Statement):
    params: Params = None
    format: ResultFormat = "json"


class _Schema(_Timed):
    table: str | None = None


TOOLS: dict[str, BuiltInTool] = {
    # `query` and `script` run any statement, so they may change the database.
    "query": BuiltInTool(_Query, "Run one SQL statement; its rows, or how many it changed."),
    "script": BuiltInTool(_Statement, "Run several SQL statements, all or nothing."),
    "explain": BuiltInTool(_Explain, "Show a statement's query plan; nothing is run.", reads=True),
    "compare": BuiltInTool(_Compare, "Whether two queries give the same rows here; nothing is changed.", reads=True),
    "tables": BuiltInTool(_Timed, "List tables and views.", reads=True),
    "schema": BuiltInTool(_Schema, "Show the definition of one table, or of everything.", reads=True),
}
ASKED = frozenset({"tables", "schema"})
"""Tools that take GET too."""


def parse(method: str, path: str, query: str, body: bytes, spec: EnvironmentSpec) -> ToolCall:
    """Return the call of a request to the sql endpoint, with its canonical statement. Raises RefusalError (4xx)."""
    if not spec.databases:
        raise RefusalError(
            404, "no-database", "this task has no database. PUT it with `databases`: docs/sql.md shows how."
        )
    if path not in TOOLS:
        raise RefusalError(404, "no-such-tool", f"the sql endpoint has {', '.join(TOOLS)}.")
    methods = ("GET", "POST") if path in ASKED else ("POST",)
    if method not in methods:
        raise RefusalError(405, "method", f"{path} takes {' or '.join(methods)}.")
    given = (
        dict(parse_qsl(query))
        if method == "GET"
        else json_object(body or b"{}", '{"sql": "SELECT 1"}', slug="arguments")
    )
    # A query string has only text, which is converted; in a body the types must be right.
    arguments = checked_arguments(path, TOOLS[path].kind, given, strict=method != "GET").model_dump()
    arguments["database"] = _database(arguments["database"], spec)
    for member in ("sql", "gold"):
        if member in arguments:
            arguments[member] = _statement(member, arguments[member], path, spec)
    return ToolCall("sql", path, arguments)


def _database(name: str | None, spec: EnvironmentSpec) -> str:
    if name is None:
        return next(iter(spec.databases))
    if name not in spec.databases:
        raise RefusalError(422, "no-such-database", f"this task's databases are: {', '.join(spec.databases)}.")
    return name


def _statement(member: str, sql: str, tool: str, spec: EnvironmentSpec) -> str:
    if len(sql.encode()) > MAX_STATEMENT_BYTES:
        raise RefusalError(
            413, member, f"{member!r} is longer than {MAX_STATEMENT_BYTES} bytes. Split it into several calls."
        )
    if "\0" in sql:
        raise RefusalError(
            422, member, f"{member!r} holds a NUL, which SQL does not allow. Pass binary data in `params`."
        )
    # A script stays as it is: the database keeps the text of views and triggers that it creates.
    return sql if tool == "script" else canonical_statement(sql, spec.sql_dialect)
