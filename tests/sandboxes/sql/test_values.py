"""Values as JSON and as text, without loss."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.sql.render import RENDERERS
from sandboxes.sql.results import Failure, RowCollector, comparison, failure, success
from sandboxes.sql.values import decode, encode, encode_text, plain
from sandboxes.sqlite.driver import SqliteDriver
from tests.sandboxes.sql_calls import ask
from tests.sandboxes.sqlite_files import driven, make, responses_to, spec_of

integers = st.integers(-(2**63), 2**63 - 1)
values = st.one_of(st.none(), integers, st.floats(allow_nan=False), st.text(), st.binary())


@given(values)
def test_values_survive_a_round_trip(value: Any) -> None:
    """Every value of an engine reads back from JSON with its type and, for a float, its sign."""
    sent = orjson.loads(orjson.dumps(encode(value)))
    back = decode(sent)
    assert (type(back), back) == (type(value), value)
    assert not isinstance(back, float) or math.copysign(1, back) == math.copysign(1, value)


@given(st.binary())
def test_text_that_is_not_utf8_survives(data: bytes) -> None:
    """SQLite does not check text; what is not UTF-8 travels in base64."""
    value = encode_text(data)
    assert (isinstance(value, str) and value.encode() == data) or set(value) == {"text_base64"}  # type: ignore[arg-type]


def test_values_without_json_form_are_tagged() -> None:
    """NaN, infinities, huge integers, blobs and dates are objects with one member."""
    assert encode(math.nan) == {"float": "nan"}
    assert encode(-math.inf) == {"float": "-inf"}
    assert encode(2**70) == {"decimal": str(2**70)}
    assert encode(b"\0\xff") == {"base64": "AP8="}
    assert math.isnan(decode({"float": "nan"}))  # type: ignore[arg-type]
    assert [decode({kind: "x"}) for kind in ("decimal", "date", "timestamp", "uuid", "json")] == ["x"] * 5


@pytest.mark.parametrize("value", [{"base64": "?"}, {"unknown": "x"}, {"float": "x"}, {}, {"date": "a", "time": "b"}])
def test_invalid_parameters_are_refused(value: dict[str, str]) -> None:
    """The error says which values a parameter can have."""
    with pytest.raises(ValueError, match="parameter"):
        decode(value)


def test_database_returns_parameters_unchanged(tmp_path: Path) -> None:
    """Values that were inserted as parameters are read back with their type."""
    given_values = [2**63 - 1, -0.0, 1e308, 5e-324, "\0 in the middle", "\U0010ffff", b"", b"\0", None, 1.0, 1]

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db", "CREATE TABLE t (a)")))
        for value in given_values:
            wrote = await ask(sandbox, "INSERT INTO t VALUES (?)", params=[encode(value)])
            assert wrote.error is None
        read = await ask(sandbox, "SELECT a, typeof(a) FROM t")
        kinds = {int: "integer", float: "real", str: "text", bytes: "blob", type(None): "null"}
        assert read.rows == [[encode(value), kinds[type(value)]] for value in given_values]
        named = await ask(sandbox, "SELECT :a, $b", params={"a": {"decimal": "1.10"}, "b": {"base64": "AP8="}})
        assert named.rows == [["1.10", {"base64": "AP8="}]]
        for params in ([], [1, 2, 3], {"c": 1}, [{"nonsense": "x"}], [{"text_base64": "/w=="}]):
            wrong = await ask(sandbox, "SELECT ?, ?" if isinstance(params, list) else "SELECT :a", params=params)
            assert wrong.error is not None
            assert wrong.error["kind"] == "sql"

    driven(tmp_path, test)


def test_non_utf8_text_is_tagged_in_results(tmp_path: Path) -> None:
    """Valid text, blobs and invalid text have three different forms."""
    odd, even, joined = responses_to(
        tmp_path, "SELECT CAST(x'66ff' AS TEXT)", "SELECT CAST(x'66' AS TEXT)", "SELECT 'a', x'62', CAST(x'ff' AS TEXT)"
    )
    assert (odd.value, even.value) == ({"text_base64": "Zv8="}, "f")
    assert joined.rows == [["a", {"base64": "Yg=="}, {"text_base64": "/w=="}]]


# -- text formats -----------------------------------------------------------------------------------------------------

COLUMNS = ["id", "name", "share"]
ROWS: list[list[Any]] = [[1, "Ann", 0.5], [22, None, 12.25], [3, "a|b\nc", None], [4, "", {"decimal": "1.10"}]]


def test_table_columns_are_aligned() -> None:
    """Text is aligned to the left and numbers to the right."""
    text = RENDERERS["table"](COLUMNS, ROWS[:2])
    assert text == "id | name | share\n---+------+------\n 1 | Ann  |   0.5\n22 | NULL | 12.25"


def test_markdown_escapes_cells() -> None:
    """A pipe or a line break in a cell does not end the cell."""
    text = RENDERERS["markdown"](COLUMNS, ROWS[2:3])
    assert text == "| id | name | share |\n| ---: | --- | --- |\n| 3 | a\\|b<br>c | NULL |"


def test_csv_distinguishes_null_from_empty_text() -> None:
    """NULL is an empty field, and empty text is quoted."""
    assert RENDERERS["csv"](COLUMNS, ROWS) == 'id,name,share\n1,Ann,0.5\n22,,12.25\n3,"a|b\nc",\n4,"",1.10\n'


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=2, max_size=2)))
def test_csv_reads_back(rows: list[list[str]]) -> None:
    """Python's CSV reader returns the same cells."""
    text = RENDERERS["csv"](["a", "b"], rows)
    assert list(csv.reader(io.StringIO(text, newline="")))[1:] == rows


def test_skyrl_text_equals_pandas() -> None:
    """Each expectation was made with `pandas.DataFrame(rows, columns=columns).to_string(index=False)`, pandas 2.2."""
    frame = RENDERERS["skyrl"]
    assert frame(["name", "age"], [["Joe", 52], ["Ann-Marie", 7]]) == "     name  age\n      Joe   52\nAnn-Marie    7"
    assert frame(["x"], [[1.5], [2.25], [None]]) == "   x\n1.50\n2.25\n NaN"
    assert frame(["a", "b"], []) == "Empty DataFrame\nColumns: [a, b]\nIndex: []"
    assert frame(["n"], [[None], ["x"]]) == "   n\nNone\n   x"
    assert frame(["x"], [[1e-9], [1.0]]) == "           x\n1.000000e-09\n1.000000e+00"


def test_skyrl_cuts_long_text_to_fifty_rows() -> None:
    """A text of more than 9,000 characters is cut, as in SkyRL-SQL."""
    rows: list[list[Any]] = [[n, "x" * 60] for n in range(200)]
    text = RENDERERS["skyrl"](["n", "text"], rows)
    assert text.startswith("Truncated to 50 lines since returned response too long:  n ")
    assert len(text.splitlines()) == 51
    assert len(RENDERERS["skyrl"](["n", "text"], rows[:100]).splitlines()) == 101


def test_results_carry_text_formats(tmp_path: Path) -> None:
    """A text format replaces `rows` by `text`, for failures and timeouts too."""

    async def test(driver: SqliteDriver) -> None:
        sandbox = await driver.start(spec_of(make(tmp_path / "s.db")))
        for shape in RENDERERS:
            fine = await ask(sandbox, "SELECT 1 AS a", format=shape)
            assert (set(fine.body), fine.body["row_count"]) == (
                {"columns", "text", "row_count", "truncated", "error"}, 1,
            )  # fmt: skip
            assert "rows" not in fine.body
            wrong = await ask(sandbox, "SELECT missing", format=shape)
            assert wrong.body["text"] == "Error executing SQL: no such column: missing"
        endless = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"
        late = await ask(sandbox, endless, format="skyrl", timeout_s=0.1)
        assert late.body["text"] == f"SQL Timeout:\n{endless}"

    driven(tmp_path, test)


# -- results ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(integers, min_size=1, max_size=3)), st.integers(0, 5), st.integers(0, 60))
def test_collector_stops_at_first_limit(rows: list[list[int]], max_rows: int, max_bytes: int) -> None:
    """Rows are collected in order up to the limit of rows or of bytes."""
    collector = RowCollector(max_rows, max_bytes).add_all(list(row) for row in rows)
    assert collector.rows == rows[: len(collector.rows)]
    assert len(collector.rows) <= max_rows
    assert sum(len(orjson.dumps(row)) + 1 for row in collector.rows) <= max_bytes
    assert collector.truncated is (len(collector.rows) < len(rows))


def test_aligned_text_is_cut_to_its_limit() -> None:
    """One wide value widens its whole column, so the text is larger than the values."""
    values: list[list[Any]] = [["x" * 1000, 1], *(["y", n] for n in range(100))]
    rows = RowCollector(10_000, 5000).add_all(values)
    result = orjson.loads(success(["a", "b"], rows, shape="table"))
    assert result["truncated"]
    assert len(result["text"].encode()) <= 5000


def test_failures_have_one_shape() -> None:
    """Statements and comparisons report errors in the same member."""
    result = orjson.loads(failure(Failure("why", "sql", "X")))
    assert result == {
        "columns": [], "rows": [], "row_count": 0, "truncated": False,
        "error": {"message": "why", "kind": "sql", "code": "X"},
    }  # fmt: skip
    result = orjson.loads(comparison({}, {"sql": None, "gold": Failure("why")}, ordered=False))
    assert result == {"match": False, "why": "gold fails", "error": {"message": "why", "kind": "sql", "of": "gold"}}


def test_plain_text_of_tagged_values() -> None:
    """Text formats show a tagged value without its tag."""
    tagged: list[Any] = [{"base64": "AP8="}, {"decimal": "1.10"}, {"text_base64": "/w=="}, None, True]
    assert [plain(value) for value in tagged] == ["x'00ff'", "1.10", "\ufffd", None, True]
