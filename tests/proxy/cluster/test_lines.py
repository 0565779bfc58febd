"""Lines of the log come back as they were written."""

import struct
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.lines import Deleted, ForgottenRows, Line, LogError, decode, encode
from proxy.cluster.protocol import Ended, Position, StepId, Stepped
from proxy.storage.copies import (
    FindingCopy,
    MasksCopy,
    NodeCopy,
    NoteCopy,
    RecordCopy,
    RolloutCopy,
    TaskCopy,
    TreeCopy,
)

NUMBERS = st.integers(0, 2**53 - 1)
VALUES = {
    int: NUMBERS, float: st.floats(allow_nan=False, allow_infinity=False), bool: st.booleans(),
    bytes: st.binary(max_size=50), str: st.text(max_size=20), float | None: st.none() | st.floats(0, 1e9),
    bytes | None: st.none() | st.binary(max_size=32), str | None: st.none() | st.text(max_size=20),
    list[int]: st.lists(NUMBERS, max_size=3),
    int | None: st.none() | NUMBERS, Position: st.builds(Position, NUMBERS, NUMBERS),
    StepId: st.builds(StepId, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
}  # fmt: skip
KINDS: tuple[type[Line], ...] = (
    TaskCopy, TreeCopy, RecordCopy, FindingCopy, RolloutCopy, NoteCopy, Stepped, Ended, Deleted,
    NodeCopy, MasksCopy, ForgottenRows,
)  # fmt: skip


def lines_of(kind: type[Line]) -> st.SearchStrategy[Line]:
    return st.builds(kind, *(VALUES[hint] for hint in get_type_hints(kind).values()))


LINES = st.lists(st.one_of([lines_of(kind) for kind in KINDS]), max_size=4)


@given(LINES)
def test_lines_come_back(lines: list[Line]) -> None:
    """All kinds, with their types."""
    again = list(decode(encode(lines)))
    assert again == lines
    assert [type(line) for line in again] == [type(line) for line in lines]


def test_records_of_before_use_what_is_not_known() -> None:
    """Lines of a log that an earlier version has written lack the last members."""
    record = RecordCopy(1, 1, 1, b"k", 2, 1, 0.1, 1.0, False, True, None, True, b"e", b"c", b"{}", b"", b"200 \n")
    first, second = encode([record._replace(cpu_s=0.5)]), encode([record])
    assert first.count(b"0.5") == 1
    size, blob_bytes = struct.unpack_from("!II", second)
    array = second[8 : 8 + size].replace(b",null,null,null,null]", b"]")
    assert len(array) == size - 4 * len(",null")
    assert list(decode(struct.pack("!II", len(array), blob_bytes) + array + second[8 + size :])) == [record]


@given(LINES.filter(bool), st.data())
def test_a_cut_row_is_an_error(lines: list[Line], data: st.DataObject) -> None:
    """A row that ends early never passes for a shorter one, except between two lines."""
    body = encode(lines)
    size = data.draw(st.integers(1, len(body) - 1))
    whole = [encode(lines[:count]) for count in range(len(lines))]
    if body[:size] in whole:
        return
    with pytest.raises(LogError):
        list(decode(body[:size]))


@given(st.binary(min_size=1, max_size=60))
def test_foreign_bytes_are_refused(body: bytes) -> None:
    """The only error is the one that callers expect."""
    with pytest.raises(LogError):
        list(decode(body))
