"""Text formats for rows, as SQL agents read them (pure).

The format `skyrl` is that of SkyRL-SQL's environment: the text of a pandas data frame, cut to 50 rows above 9,000
characters. Unlike that environment, this module keeps column names, equal rows and the engine's order of rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from sandboxes.sql.values import Value, plain

SKYRL_CHARS = 9000
"""SkyRL-SQL cuts a text that is longer than this many characters."""
SKYRL_ROWS = 50
"""Rows that SkyRL-SQL shows of a text that it cuts."""
_DIGITS = 6
"""Digits after the decimal point that pandas shows (`display.precision`)."""
_CSV_QUOTED = frozenset(',"\r\n')
_NUMBERS = {"float", "decimal"}
"""Tags of values that are numbers without a JSON form."""

Rows = Sequence[Sequence[Value]]
Renderer = Callable[[Sequence[str], Rows], str]


def table(columns: Sequence[str], rows: Rows) -> str:
    """Return an aligned table: a heading, a rule and the rows. Columns of numbers are aligned to the right."""
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    right = [_numeric(rows, n) for n in range(len(columns))]
    lines = [_line(columns, widths, [False] * len(widths)), "-+-".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths, right) for row in shown])


def markdown(columns: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table. Pipes and line breaks in cells are escaped."""
    shown = [[_in_markdown(_cell(value)) for value in row] for row in rows]
    marks = ["---:" if _numeric(rows, n) else "---" for n in range(len(columns))]
    lines = [[_in_markdown(name) for name in columns], marks, *shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_csv(columns: Sequence[str], rows: Rows) -> str:
    r"""Return CSV (RFC 4180) with a heading and `\n` line ends. NULL is an empty field, empty text is `""`."""
    return "".join(",".join(map(_csv_cell, line)) + "\n" for line in [columns, *rows])


def skyrl(columns: Sequence[str], rows: Rows) -> str:
    """Return the text of `pandas.DataFrame.to_string(index=False)`, cut by SkyRL-SQL's rule."""
    text = _frame(columns, rows)
    if len(text) <= SKYRL_CHARS:
        return text
    return f"Truncated to {SKYRL_ROWS} lines since returned response too long: {_frame(columns, rows[:SKYRL_ROWS])}"


RENDERERS: dict[str, Renderer] = {"table": table, "markdown": markdown, "csv": to_csv, "skyrl": skyrl}
"""Renderers by the names that the sql endpoint uses. Its format `json` is not text and needs no renderer."""


def _cell(value: Value) -> str:
    shown = plain(value)
    if shown is None:
        return "NULL"
    return str(shown).lower() if isinstance(shown, bool) else str(shown)


def _numeric(rows: Rows, column: int) -> bool:
    values = [row[column] for row in rows if row[column] is not None]
    return bool(values) and all(
        (isinstance(v, int | float) and not isinstance(v, bool)) or (isinstance(v, dict) and v.keys() <= _NUMBERS)
        for v in values
    )


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    )
    return " | ".join(padded).rstrip()


def _in_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r\n", "<br>").replace("\n", "<br>")


def _csv_cell(value: Value) -> str:
    if value is None:
        return ""
    text = _cell(value)
    # Empty text is quoted, because an unquoted empty field is NULL.
    if text and _CSV_QUOTED.isdisjoint(text):
        return text
    return '"' + text.replace('"', '""') + '"'


def _frame(columns: Sequence[str], rows: Rows) -> str:
    if not rows:
        return f"Empty DataFrame\nColumns: [{', '.join(columns)}]\nIndex: []"
    shown = []
    for n, name in enumerate(columns):
        values, numeric = _column([plain(row[n]) for row in rows])
        # Above numbers, pandas leaves room for a sign.
        heading = f" {name}" if numeric else name
        width = max(len(heading), *map(len, values))
        shown.append([text.rjust(width) for text in (heading, *values)])
    return "\n".join(" ".join(line) for line in zip(*shown, strict=True))


def _column(values: list[Any]) -> tuple[list[str], bool]:
    numbers = [v for v in values if v is not None]
    if not numbers or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers):
        return [str(v) for v in values], False
    if all(isinstance(v, int) for v in values):
        return [str(v) for v in values], True
    # pandas turns a column of integers with a NULL into floats.
    floats = [math.nan if v is None else float(v) for v in values]
    return _floats(floats), True


def _floats(values: list[float]) -> list[str]:
    """Format a column of floats in one notation as pandas does (`FloatArrayFormatter`, pandas 2.2)."""
    finite = [v for v in values if math.isfinite(v)]
    fixed = [f"{v:.{_DIGITS}f}" for v in finite]
    long = max(map(len, fixed), default=0) > _DIGITS + 6
    small = any(0 < abs(v) < 10**-_DIGITS for v in finite)
    if small or (long and any(abs(v) > 1e6 for v in finite)):
        return [f"{v:.{_DIGITS}e}" if math.isfinite(v) else _non_finite(v) for v in values]
    while fixed and all(text.endswith("0") and not text.endswith(".0") for text in fixed):
        fixed = [text[:-1] for text in fixed]
    remaining = iter(fixed)
    return [next(remaining) if math.isfinite(v) else _non_finite(v) for v in values]


def _non_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value}"
