"""Rows of a state, in memory and in tables, against a plain dictionary."""

import os
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.guest.files import row_table, state_rows
from sandboxes.guest.files.row_table import CLOCKED, FIXED, GONE, Row, RowTable
from sandboxes.guest.files.state_rows import StateRows

NAMES = ["", "a", "a/b", "a/b/c", "a-", "a0", "b", "b/x", "b/y", "\udcff", "c"]
ROWS = st.one_of(
    st.none(),
    st.just(Row(GONE)),
    st.builds(Row, st.just(FIXED), st.sampled_from([b"1" * 16, b"2" * 16]), st.integers(-5, 5)),
    st.builds(Row, st.just(CLOCKED), st.sampled_from([b"", b"3" * 16]), st.integers(1, 6)),
)
LAYER = st.dictionaries(st.sampled_from(NAMES), ROWS, max_size=6)


def named(rows: dict[str, Row]) -> object:
    """Return what the digests of a state stand for: its rows, with the rank of each time of the clock."""
    times = sorted({row.mtime_ns for row in rows.values() if row.kind == CLOCKED})
    return sorted(
        (path, row.kind, row.what, times.index(row.mtime_ns) if row.kind == CLOCKED else row.mtime_ns)
        for path, row in rows.items()
    )


def reloaded(state: StateRows, layers: list[bytes]) -> StateRows:
    """Return the state as a restored sandbox has it: from its layers' tables, of which the first is the lowest."""
    tables = [RowTable(memoryview(layer)) for layer in reversed(layers)]
    whole = next((at for at, table in enumerate(tables) if table.complete), len(tables))
    known = StateRows(tables[:whole], tables[whole] if whole < len(tables) else None)
    assert (known.content, known.order) == (state.content, state.order)
    return known


@settings(deadline=None, max_examples=150)
@given(st.lists(LAYER, max_size=6), st.integers(0, 4), st.lists(st.booleans(), min_size=6, max_size=6))
def test_digests_name_rows_and_their_order(layers: list[dict[str, Row | None]], least: int, reload: list[bool]) -> None:
    """Whatever the history, the tables and the restores: equal rows in equal order have equal digests, others not."""
    rows: dict[str, Row] = {}
    state, stored = StateRows(), []
    before, state_rows.LEAST_ROWS = state_rows.LEAST_ROWS, least
    try:
        for layer, again in zip(layers, reload, strict=False):
            changed = any(rows.get(path) != row for path, row in layer.items())
            assert state.update(layer) == changed
            rows = {path: row for path, row in {**rows, **layer}.items() if row is not None}
            stored.append(state.table_of(layer))
            row_table.check(stored[-1])
            if again:
                state = reloaded(state, stored)
            assert dict(state.items()) == rows
            assert {path: state.get(path) for path in NAMES} == {path: rows.get(path) for path in NAMES}
            assert sorted(state.below("a")) == sorted(path for path in rows if path.startswith("a/"))
            assert state.is_root == (not rows)
            direct = StateRows()
            direct.update(rows)
            assert state.digests(b"s") == direct.digests(b"s")
            assert state.latest_ns == max((row.mtime_ns for row in rows.values() if row.kind == CLOCKED), default=0)
    finally:
        state_rows.LEAST_ROWS = before


@settings(deadline=None, max_examples=300)
@given(LAYER, LAYER)
def test_different_rows_have_different_digests(one: dict[str, Row | None], other: dict[str, Row | None]) -> None:
    states = [StateRows(), StateRows()]
    for state, rows in zip(states, (one, other), strict=True):
        state.update(rows)
    same = named(dict(states[0].items())) == named(dict(states[1].items()))
    assert (states[0].digests(b"") == states[1].digests(b"")) == same


def test_a_mapped_table_needs_no_memory_for_its_rows() -> None:
    """A table of many rows is looked up in its file, and writing few rows beside it costs few."""
    state = StateRows()
    state.update({f"d{number % 100}/f{number}": Row(CLOCKED, b"w" * 16, 10**18 + number) for number in range(3000)})
    table = state.table_of({})
    with tempfile.TemporaryFile() as file:
        file.write(table)
        file.flush()
        mapped = row_table.mapped(os.dup(file.fileno()))
    assert mapped is not None
    assert mapped.complete
    restored = StateRows((), mapped)
    assert restored.changes == {}
    few = {"d1/f1": None, "d2/f2": Row(CLOCKED, b"v" * 16, 10**18 + 5000)}
    assert restored.update(few)
    assert state.update(few)
    assert restored.digests(b"") == state.digests(b"")
    layer = RowTable(memoryview(restored.table_of(few)))
    assert (len(layer), layer.complete) == (2, False)
