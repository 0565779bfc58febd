"""Results as notebooks show them, and as data frames. What agents made is escaped and cut. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

_STYLE = "font-family:ui-monospace,monospace;font-size:12px;white-space:pre-wrap"
_CELL = "text-align:left"
_TEXT_CHARS = 2000
"""Longest text of a value in a notebook, in characters."""
_CELL_CHARS = 120
"""Longest text in a cell of a table."""
_ROWS = 50
"""Most rows of a table; a last row counts the others."""
_HIDDEN = frozenset({"raw", "token"})
"""Members that no notebook shows: what other members have too, and secrets."""
_SPREAD = {"labels": "label", "totals": "total", "marks": "mark"}
"""Members whose own members are columns of a data frame, and what precedes their names."""


class Shown:
    """A result that a notebook shows as a table of its members."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [(name, _value(value)) for name, value in _members(self).items() if name not in _HIDDEN]
        body = "".join(
            f'<tr><th style="{_CELL}">{name}</th><td style="{_CELL}">{value}</td></tr>' for name, value in rows
        )
        return f'<table style="{_STYLE}"><caption>{type(self).__name__}</caption>{body}</table>'


def to_dataframe(results: Any, library: Literal["pandas", "polars"] | None = None) -> Any:
    """Return results as a data frame, with a row for each.

    Args:
        results: Rollouts, tasks, nodes, trajectories, turns or rows of a report, or a report. Labels, totals and marks
            are columns of their own, such as `label_step` and `total_saved_s`.
        library: Library of the data frame; None for pandas, or Polars where pandas is not installed.

    Raises:
        ImportError: None of the libraries is installed.
    """
    results = results.rows if hasattr(results, "rows") else results
    rows = [_flat(result) for result in results]
    chosen = library or next((name for name in ("pandas", "polars") if find_spec(name) is not None), None)
    if chosen is None:
        raise ImportError("data frames need pandas or polars: pip install pandas.")
    frames = import_module(chosen)
    return frames.DataFrame(rows) if chosen == "pandas" else frames.DataFrame(rows, infer_schema_length=None)


def _flat(result: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in _members(result).items():
        if name in _SPREAD and isinstance(value, Mapping):
            row |= {f"{_SPREAD[name]}_{member}": each for member, each in value.items()}
        elif name not in _HIDDEN:
            row[name] = value
    return row


def _members(value: Any) -> Mapping[str, Any]:
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value if isinstance(value, Mapping) else {"": value}


def _value(value: Any) -> str:
    """Return a member's value as HTML: a list of objects as a table, a list of texts as one text."""
    if is_dataclass(value):
        value = [value]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        if is_dataclass(value[0]) or isinstance(value[0], Mapping):
            return _table(value)
        value = ", ".join(map(_text, value))
    return escape(_cut(_text(value), _TEXT_CHARS))


def _table(values: Sequence[Any]) -> str:
    rows = [_members(value) for value in values[:_ROWS]]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _HIDDEN]
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_cell(name, row.get(name)) for name in names)}</tr>" for row in rows)
    more = f"<tr><td>… {len(values) - _ROWS} more</td></tr>" if len(values) > _ROWS else ""
    return f"<table><tr>{head}</tr>{body}{more}</table>"


def _cell(name: str, value: Any) -> str:
    text, most = _text(value), _TEXT_CHARS if name == "diff" else _CELL_CHARS
    return f'<td style="{_CELL}" title="{escape(_cut(text, _TEXT_CHARS))}">{escape(_cut(text, most))}</td>'


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and isinstance(value.get("title"), str):
        return str(value["title"])
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=str, ensure_ascii=False) if value else ""
    return str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
