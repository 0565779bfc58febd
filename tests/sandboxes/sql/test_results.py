"""Marks of SQL results: which limit a statement reached, from members that no row can forge."""

import pytest

from sandboxes.sql.results import Failure, RowCollector, comparison, failure, marks_of, success

FORGED = '"truncated":true,"error":null}'


@pytest.mark.parametrize("shape", ["json", "skyrl"])
def test_only_left_out_rows_are_marked(shape: str) -> None:
    whole, cut = RowCollector(9, 9999), RowCollector(1, 9999)
    for collector in (whole, cut):
        for _ in range(2):
            collector.add([FORGED])
    assert [marks_of(success(["a"], each, shape=shape)) for each in (whole, cut)] == [(), ("output",)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Failure("took longer", "timeout"), ("timeout",)),
        (Failure("database or disk is full", "limit", "SQLITE_FULL"), ("disk",)),
        (Failure("the database grew, and limits.disk_mb allows 8", "limit"), ("disk",)),
        (Failure("the statement needs more than 64 MB of memory", "limit"), ("memory",)),
        (Failure("string or blob too big", "limit", "SQLITE_TOOBIG"), ()),
        (Failure("no such table: memory, limits.disk_mb, timeout"), ()),
    ],
)
def test_limit_of_a_failure_is_marked(error: Failure, expected: tuple[str, ...]) -> None:
    assert marks_of(failure(error)) == expected
    assert marks_of(comparison({}, {"sql": error, "gold": None}, ordered=False)) == expected
