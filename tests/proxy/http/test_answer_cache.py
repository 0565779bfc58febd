"""Recorded answers are held once, and cut apart where a miss or another client's form needs the parts."""

from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from proxy.http.answer_cache import Answers, hit_headers, response
from proxy.tree.tree import Node, Record
from sandboxes.calls import ResourceUse, ToolResult
from sandboxes.effects import Effect

if TYPE_CHECKING:
    from proxy.storage.records import RecordStore

names = st.from_regex(r"[a-z]+(-[a-z]+)?", fullmatch=True).map(lambda name: f"own-{name}")
values = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), max_size=20)
amounts = st.none() | st.integers(0, 1 << 62)
uses = st.none() | st.builds(ResourceUse, st.none() | st.floats(0, 1e6), amounts, amounts, amounts)
headers = st.lists(st.tuples(names, values), min_size=1, max_size=5).map(tuple)


class Results:
    """A store that has one answer for every record."""

    def __init__(self, result: ToolResult, used: ResourceUse | None) -> None:
        self._result, self._used = result, used

    def result(self, _record: Record) -> ToolResult:
        return self._result

    def resources(self, _record: Record) -> ResourceUse | None:
        return self._used


def answers(result: ToolResult, budget_bytes: int = 1 << 20, used: ResourceUse | None = None) -> Answers:
    return Answers(cast("RecordStore", Results(result, used)), budget_bytes=budget_bytes)


def record(number: int = 1) -> Record:
    node = Node(7)
    return Record(number, b"key", node, node, Effect.NONE, 0.0, 0.0)  # type: ignore[arg-type]


@given(headers, st.binary(max_size=100), st.sampled_from([200, 204, 404]), uses)
def test_parts_of_an_answer_make_its_response(
    own: tuple[tuple[str, str], ...], body: bytes, status: int, used: ResourceUse | None
) -> None:
    ready = answers(ToolResult(status, "text/plain", body, own), used=used).of(record())
    assert (ready.status, ready.body) == (status, body)
    expected = [(name.encode(), value.encode()) for name, value in own]
    assert ready.headers == [*expected, (b"x-forkpoint-node", b"n7")]
    assert ready.own == len(own)
    assert ready.hit == response(status, ready.headers + ready.hit_headers, body)


def test_header_leaves_out_what_is_not_known() -> None:
    """0 is said, and what is not known has no entry."""
    known = answers(ToolResult(200, "text/plain", b""), used=ResourceUse(0.3125, 0, None, 4096)).of(record())
    none = dict(hit_headers())[b"server-timing"]
    assert dict(known.hit_headers)[b"server-timing"] == none + b", cpu;dur=312.500, memory;desc=0, written;desc=4096"
    assert answers(ToolResult(200, "text/plain", b"")).of(record()).hit_headers == hit_headers()


def test_memory_of_answers_stays_below_the_budget() -> None:
    cache = answers(ToolResult(200, "text/plain", b"x" * 1000), budget_bytes=10_000)
    for number in range(100):
        cache.of(record(number))
    assert 5_000 < cache.used_bytes <= 10_000
