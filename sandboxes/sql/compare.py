"""Execution match: whether two queries return the same rows (pure)."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

Row = tuple[Hashable, ...]


def judge(rows: Sequence[Row], gold: Sequence[Row], *, ordered: bool) -> dict[str, Any]:
    """Compare rows with the gold query's: `match`, `why` (empty on a match), and both counts.

    Column names do not count. 1 and 1.0 are the same value, as in every SQL engine; '1' is another one. Without
    `ordered`, the rows are compared as multisets.
    """
    why = _difference(rows, gold, ordered=ordered)
    return {"match": not why, "why": why, "rows": len(rows), "gold_rows": len(gold)}


def hashable(row: Iterable[Any]) -> Row:
    """Convert a row of JSON values so that equal rows are equal dictionary keys."""
    return tuple(tuple(value.items()) if isinstance(value, dict) else value for value in row)


def _difference(rows: Sequence[Row], gold: Sequence[Row], *, ordered: bool) -> str:
    if rows and gold and len(rows[0]) != len(gold[0]):
        return f"{len(rows[0])} columns, gold has {len(gold[0])}"
    if len(rows) != len(gold):
        return f"{len(rows)} rows, gold has {len(gold)}"
    if ordered:
        first = next((n for n, pair in enumerate(zip(rows, gold, strict=True)) if pair[0] != pair[1]), None)
        return "" if first is None else f"row {first + 1} differs from gold's"
    missing = (Counter(gold) - Counter(rows)).total()
    return f"{missing} of gold's rows are missing" if missing else ""
