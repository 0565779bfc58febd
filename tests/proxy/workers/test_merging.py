"""Views of all workers, from the views of each."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.workers.merging import added, merged_metrics, merged_page, merged_stats, merged_steps, merged_wrong_answers
from proxy.workers.views import _once_each

Lists = st.lists(st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=6), min_size=1, max_size=4)


@given(Lists, st.booleans(), st.integers(1, 12))
def test_page_is_the_head_of_all_lists(lists: list[list[int | None]], descending: bool, limit: int) -> None:
    """It has what one sorted list would have, and takes the first items of each worker's page."""

    def order(value: int | None) -> tuple[bool, int]:
        return (value is not None, value or 0)

    pages = [{"items": [{"x": v} for v in sorted(values, key=order, reverse=descending)]} for values in lists]
    items, taken = merged_page(pages, "x", descending=descending, limit=limit)
    everything = sorted((v for values in lists for v in values), key=order, reverse=descending)
    assert [item["x"] for item in items] == everything[:limit]
    firsts = [item["x"] for page, count in zip(pages, taken, strict=True) for item in page["items"][:count]]
    assert sorted(firsts, key=order) == sorted((item["x"] for item in items), key=order)


def test_numbers_are_added() -> None:
    views = [{"a": 1, "in": {"x": 1}, "of": [1], "text": "t", "flag": True}, {"a": 2, "in": {"y": 2}, "of": [2]}]
    assert added(views) == {"a": 3, "in": {"x": 1, "y": 2}, "of": [1, 2], "text": "t", "flag": True}


def test_stats_are_of_all_workers() -> None:
    def view(calls: int, hits: int, since: str, measured: int) -> dict[str, Any]:
        costs = {"local": {"fresh_s": measured, "measured": {"fresh": measured}}}
        return {
            "calls": calls, "hits": hits, "waits": 0, "hit_rate": 0.9, "since": since, "uptime_s": measured,
            "snapshots_full": measured == 1, "reuse_rate": measured / 4, "costs": costs, "sandboxes": {"idle": 1},
        }  # fmt: skip

    total = merged_stats([view(3, 1, "b", 1), view(1, 1, "a", 3)])
    assert (total["calls"], total["hit_rate"], total["since"], total["uptime_s"]) == (4, 0.5, "a", 3)
    assert (total["snapshots_full"], total["reuse_rate"], total["sandboxes"]) == (True, 0.5, {"idle": 2})
    assert total["costs"]["local"]["fresh_s"] == 3
    assert merged_stats([view(0, 0, "a", 1)])["hit_rate"] == 0.0


def test_steps_end_together() -> None:
    """A worker that was started again has fewer of them."""
    longer, shorter = [{"at": "1", "hits": 1}, {"at": "2", "hits": 2}], [{"at": "3", "hits": 4}]
    assert merged_steps([longer, shorter]) == [{"at": "1", "hits": 1}, {"at": "3", "hits": 6}]
    assert merged_steps([[], []]) == []


def test_wrong_answers_have_bounds_over_all() -> None:
    def page(checked: int, differing: int) -> dict[str, Any]:
        return {"items": [{"sample": "hits", "checked": checked, "differing": differing}]}

    (row,) = merged_wrong_answers([page(90, 0), page(10, 1), {"items": []}])
    assert (row["sample"], row["checked"], row["differing"], row["seen"]) == ("hits", 100, 1, 0.01)
    assert row["low"] < 0.01 < row["high"] < 0.06


def test_metrics_name_their_worker() -> None:
    """Samples of one metric stay together, which the format asks for."""
    text = b'# HELP a About a.\n# TYPE a counter\na{x="1"} 1.0\n# HELP b About b.\n# TYPE b gauge\nb 2.0\n'
    assert merged_metrics({0: text, 3: text}).decode().splitlines() == [
        "# HELP a About a.", "# TYPE a counter", 'a{worker="0",x="1"} 1.0', 'a{worker="3",x="1"} 1.0',
        "# HELP b About b.", "# TYPE b gauge", 'b{worker="0"} 2.0', 'b{worker="3"} 2.0',
    ]  # fmt: skip


def test_alert_of_several_workers_is_shown_once() -> None:
    """Since it was first raised, whichever worker that was."""
    views = [
        {"items": [{"summary": text, "timestamp": at} for text, at in alerts]}
        for alerts in ([("full", "11:02"), ("slow", "11:00")], [("full", "11:01")])
    ]
    assert [(each["summary"], each["timestamp"]) for each in _once_each(views)["items"]] == [
        ("full", "11:01"), ("slow", "11:00"),
    ]  # fmt: skip
