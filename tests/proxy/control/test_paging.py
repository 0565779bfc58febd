"""Pages of lists: each item comes once, whatever is added or removed meanwhile; cursors and sort keys are checked."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.control.api_description import operations
from proxy.control.paging import ListQuery, Order
from proxy.refusals import RefusalError
from tests.proxy.serving import Running, serving

rows = st.tuples(st.integers(0, 3), st.integers(0, 1 << 40))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for number in range(5):
            running.exec(f"r{number}", f"echo {number} > f", task=f"t{number % 2}").raise_for_status()
        yield running


@given(
    stays=st.sets(rows), goes=st.sets(rows), comes=st.sets(rows), limit=st.integers(1, 4), descending=st.booleans(),
    in_store=st.booleans(),
)  # fmt: skip
def test_items_come_once_while_others_come_and_go(
    stays: set[Order], goes: set[Order], comes: set[Order], limit: int, *, descending: bool, in_store: bool
) -> None:
    """Both ways to a page, in memory and in SQL, are the same list."""
    query, seen, entries = ListQuery("key", descending, limit), list[Order](), stays | goes
    cursor: str | None = ""
    while cursor is not None:
        wanted = query.at(cursor) if cursor else query
        part = from_store(entries, wanted) if in_store else wanted.sorted_part(entries, lambda row: row)
        assert (part.total, len(part.entries) <= limit) == (len(entries), True)
        # What follows is empty only where all of it has gone meanwhile.
        assert part.entries or goes or not cursor
        seen += part.entries
        cursor, entries = part.next, stays | comes
    assert seen == sorted(set(seen), reverse=descending)
    assert stays <= set(seen)


def from_store(entries: set[Order], wanted: ListQuery) -> Any:
    end, values = wanted.sql("key", "id")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE entries (key, id)")
        connection.executemany("INSERT INTO entries VALUES (?, ?)", entries)
        found = connection.execute(f"SELECT * FROM entries WHERE 1{end}", values).fetchall()
    return wanted.part(found, len(entries), lambda row: row)


@pytest.mark.parametrize("cursor", ["x", "bnVsbA", "WyJrZXkiXQ", "WyJrZXkiLG51bGxd", "WyJvdGhlciIsMV0", "=", "ä"])
def test_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(RefusalError, match="Begin without one"):
        ListQuery("key").at(cursor).sorted_part([(1,)], lambda row: row)


def test_cursor_of_other_types_is_refused() -> None:
    part = ListQuery("key", limit=1).sorted_part(["a", "b"], lambda name: (name,))
    assert part.next is not None
    with pytest.raises(RefusalError):
        ListQuery("key").at(part.next).sorted_part([(1,)], lambda row: row)
    with pytest.raises(RefusalError):
        ListQuery("key").at(part.next).sql("name", "id")


def test_every_list_is_a_page(proxy: Running) -> None:
    """No operation returns a bare array, and those that list can be sorted and followed."""
    schema = proxy.client.get("/openapi.json").json()
    for _, path, about in operations(schema):
        answers: dict[str, Any] = about["responses"]
        content = next(each for status, each in answers.items() if status[0] == "2").get("content", {})
        shape = content.get("application/json", {}).get("schema", {})
        shape = schema["components"]["schemas"][shape["$ref"].rpartition("/")[2]] if "$ref" in shape else shape
        assert shape.get("type") != "array", path
        if about["operationId"].startswith("list_"):
            assert {"items", "total", "next"} <= set(shape["required"]), path
            assert {"sort", "limit", "cursor"} <= {each["name"] for each in about["parameters"]}, path


def test_times_are_in_utc(proxy: Running) -> None:
    """Each member that is a time says so in the description."""
    schemas = proxy.client.get("/openapi.json").json()["components"]["schemas"]
    times = {
        (name, member): shape.get("anyOf", [shape])[0].get("format")
        for name, about in schemas.items()
        for member, shape in about.get("properties", {}).items()
        if member.endswith("_at") or member in {"at", "since"}
    }
    assert len(times) > 10
    assert set(times.values()) == {"date-time"}, times


def test_lists_are_filtered_and_sorted(proxy: Running) -> None:
    def names(path: str, member: str) -> list[str]:
        return [each[member] for each in proxy.client.get(f"/api/v1/{path}").json()["items"]]

    assert names("tasks?q=1", "task") == ["t1"]
    assert names("tasks?sort=-calls", "task") == ["t0", "t1"]
    assert names("tasks/t0/rollouts?sort=-rollout", "rollout") == ["r4", "r2", "r0"]
    assert set(names("sandboxes?task=t1", "task")) == {"t1"}
    assert names("snapshots?kind=processes", "kind") == []
    first = proxy.client.get("/api/v1/tasks/t0/rollouts?sort=rollout&limit=2").json()
    rest = proxy.client.get("/api/v1/tasks/t0/rollouts", params={"sort": "rollout", "cursor": first["next"]}).json()
    assert [each["rollout"] for each in first["items"] + rest["items"]] == ["r0", "r2", "r4"]
    assert (first["total"], rest["next"]) == (3, None)


def test_unknown_sort_key_is_refused_with_a_sentence(proxy: Running) -> None:
    answer = proxy.client.get("/api/v1/tasks?sort=size")
    assert answer.status_code == 422
    assert "not sorted by 'size'" in answer.json()["detail"]
    assert "-saved_s" in answer.json()["detail"]
