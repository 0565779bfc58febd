"""Rows as the text that SQL agents read (pure).

`skyrl` is what SkyRL-SQL's environment shows: the text of a pandas data frame, 50 rows of it where all of them would be
more than 9,000 characters. It shows the columns' names, and all rows in the engine's order; that environment loses the
names, drops equal rows and shuffles the others.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from sandboxes.sql.values import Value, plain

SKYRL_CHARS, SKYRL_ROWS = 9000, 50
_DIGITS = 6
_CSV_QUOTED = frozenset(',"\r\n')

Rows = Sequence[Sequence[Value]]
Renderer = Callable[[Sequence[str], Rows], str]


def table(columns: Sequence[str], rows: Rows) -> str:
    """Return rows under their headings, in columns of equal width; numbers to the right, NULL as NULL."""
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    right = [_numeric(rows, n) for n in range(len(columns))]
    lines = [_line(columns, widths, [False] * len(widths)), "-+-".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths, right) for row in shown])


def markdown(columns: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table; what would end a cell is escaped."""
    shown = [[_in_markdown(_cell(value)) for value in row] for row in rows]
    marks = ["---:" if _numeric(rows, n) else "---" for n in range(len(columns))]
    lines = [[_in_markdown(name) for name in columns], marks, *shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_csv(columns: Sequence[str], rows: Rows) -> str:
    """Return RFC 4180 with a heading and `\\n` line ends. NULL is nothing, empty text is `""`."""
    return "".join(",".join(map(_csv_cell, line)) + "\n" for line in [columns, *rows])


def skyrl(columns: Sequence[str], rows: Rows) -> str:
    """Return `DataFrame.to_string(index=False)`, cut by SkyRL's rule."""
    text = _frame(columns, rows)
    if len(text) <= SKYRL_CHARS:
        return text
    return f"Truncated to {SKYRL_ROWS} lines since returned response too long: {_frame(columns, rows[:SKYRL_ROWS])}"


RENDERERS: dict[str, Renderer] = {"table": table, "markdown": markdown, "csv": to_csv, "skyrl": skyrl}
"""The formats of the wire, without `json`, which is no text."""


def _cell(value: Value) -> str:
    shown = plain(value)
    if shown is None:
        return "NULL"
    return str(shown).lower() if isinstance(shown, bool) else str(shown)


def _numeric(rows: Rows, column: int) -> bool:
    """Say whether a column shows numbers and nothing else."""
    values = [row[column] for row in rows if row[column] is not None]
    return bool(values) and all(
        (isinstance(v, int | float) and not isinstance(v, bool)) or (isinstance(v, dict) and v.keys() <= _NUMBERS)
        for v in values
    )


_NUMBERS = {"float", "decimal"}


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
    if text and _CSV_QUOTED.isdisjoint(text):
        return text
    return '"' + text.replace('"', '""') + '"'


def _frame(columns: Sequence[str], rows: Rows) -> str:
    if not rows:
        return f"Empty DataFrame\nColumns: [{', '.join(columns)}]\nIndex: []"
    shown = []
    for n, name in enumerate(columns):
        values, numeric = _column([plain(row[n]) for row in rows])
        # pandas leaves room for a sign above numbers.
        heading = f" {name}" if numeric else name
        width = max(len(heading), *map(len, values))
        shown.append([text.rjust(width) for text in (heading, *values)])
    return "\n".join(" ".join(line) for line in zip(*shown, strict=True))


def _column(values: list[Any]) -> tuple[list[str], bool]:
    """Return a column's cells as pandas shows them, and whether it takes the column for numbers."""
    numbers = [v for v in values if v is not None]
    if not numbers or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers):
        return [str(v) for v in values], False
    if all(isinstance(v, int) for v in values):
        return [str(v) for v in values], True
    floats = [math.nan if v is None else float(v) for v in values]
    return _floats(floats), True


def _floats(values: list[float]) -> list[str]:
    """Return floats as pandas does: six digits after the point, less the zeros that all end in, or exponents."""
    finite = [v for v in values if math.isfinite(v)]
    fixed = [f"{v:.{_DIGITS}f}" for v in finite]
    long = max(map(len, fixed), default=0) > _DIGITS + 6
    small = any(0 < abs(v) < 10**-_DIGITS for v in finite)
    if small or (long and any(abs(v) > 1e6 for v in finite)):
        return [f"{v:.{_DIGITS}e}" if math.isfinite(v) else _unfinite(v) for v in values]
    while fixed and all(text.endswith("0") and not text.endswith(".0") for text in fixed):
        fixed = [text[:-1] for text in fixed]
    left = iter(fixed)
    return [next(left) if math.isfinite(v) else _unfinite(v) for v in values]


def _unfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value}"
