"""Times are texts of one length, whose order is that of the times."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from proxy.times import utc_text

seconds = st.floats(0, 250e9).map(lambda value: round(value, 3))


@given(seconds, seconds)
def test_texts_are_in_the_order_of_times(one: float, other: float) -> None:
    first, second = utc_text(one), utc_text(other)
    assert (first < second) == (one < other) or abs(one - other) < 1e-4
    assert len(first) == len(second) == 27
    assert abs(datetime.fromisoformat(first).timestamp() - one) < 1e-4


def test_impossible_times_are_cut() -> None:
    """An imported tree may claim any time; its views are shown all the same."""
    assert [utc_text(time)[:4] for time in (-1.0, 1e12, datetime(2026, 11, 22, tzinfo=UTC).timestamp())] == [
        "1970", "9999", "2026",
    ]  # fmt: skip
