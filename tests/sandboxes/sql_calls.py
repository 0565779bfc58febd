"""Calls of the sql endpoint in sandboxes, for tests."""

from typing import Any

import orjson

from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Sandbox

_DEFAULTS: dict[str, dict[str, Any]] = {
    "query": {"params": None, "max_rows": 100, "timeout_s": 30.0, "format": "json"},
    "script": {"timeout_s": 30.0},
    "explain": {"params": None, "timeout_s": 30.0, "format": "json"},
    "compare": {"timeout_s": 30.0, "ordered": False},
    "tables": {"timeout_s": 30.0},
    "schema": {"timeout_s": 30.0, "table": None},
}


class SqlResponse:
    """The response to a call, and what the execution reported."""

    def __init__(self, execution: Execution) -> None:
        self.body: dict[str, Any] = orjson.loads(execution.result.body)
        self.rows: list[list[Any]] = self.body.get("rows", [])
        self.error: dict[str, Any] | None = self.body["error"]
        self.effect, self.state, self.witness = execution.effect, execution.state, execution.witness
        self.shareable, self.volatile = execution.shareable, execution.volatile
        self.marks = execution.result.marks

    @property
    def value(self) -> Any:
        """The only value of a result."""
        assert self.error is None, self.error
        ((value,),) = self.rows
        return value

    @property
    def message(self) -> str:
        """The error's text; empty on success."""
        return "" if self.error is None else str(self.error["message"])


async def ask(
    sandbox: Sandbox, sql: str = "", tool: str = "query", *, database: str = "shop", **arguments: Any
) -> SqlResponse:
    """Run one call of the sql endpoint, with the defaults that the dialect fills in."""
    arguments = _DEFAULTS[tool] | {"database": database} | arguments
    if tool not in ("tables", "schema"):
        arguments["sql"] = sql
    return SqlResponse(await sandbox.execute(ToolCall("sql", tool, arguments)))
