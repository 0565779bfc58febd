"""Call keys: only equal calls share a key."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import UncanonicalArgumentsError, call_key, canonical_json, private_key, root_key
from sandboxes.calls import ToolCall

text = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(text, json, max_size=5)


def key(arguments: dict[str, Any], tool: str = "exec", body: bytes = b"") -> bytes:
    return call_key(ToolCall("shell", tool, arguments, body))


def shape(value: Any) -> Any:
    """Return value so that two are equal exactly when JSON that keeps types would be, members in any order."""
    if isinstance(value, dict):
        return "object", frozenset((name, shape(member)) for name, member in value.items())
    if isinstance(value, list):
        return "list", tuple(shape(item) for item in value)
    return type(value).__name__, repr(value)


@given(objects, objects)
def test_only_equal_arguments_share_a_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (key(one) == key(other)) == (shape(one) == shape(other))


@given(objects)
def test_the_order_of_members_does_not_count(arguments: dict[str, Any]) -> None:
    assert key(arguments) == key(dict(reversed(arguments.items())))


@given(objects)
def test_canonical_json_reads_back_equal(arguments: dict[str, Any]) -> None:
    assert shape(orjson.loads(canonical_json(arguments))) == shape(arguments)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, "1"), (1, True), (0, False), (None, "null"), ([1, 2], [2, 1]), ("\u00e9", "e\u0301")],
)
def test_values_that_print_differently_have_different_keys(one: Any, other: Any) -> None:
    assert key({"x": one}) != key({"x": other})


def test_parts_of_a_key_are_never_confused() -> None:
    calls = [
        ToolCall("a", "bc", {}), ToolCall("ab", "c", {}), ToolCall("a", "bc", {}, b"{}"), ToolCall("a", "bc", {"": 0}),
        ToolCall("a", "b", {}, b"c"), ToolCall("a", "b", {}, b"\0c"),
    ]  # fmt: skip
    assert len({call_key(call) for call in calls}) == len(calls)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1, {"x": float("-inf")}], 2**64, "\ud800", object()])
def test_uncanonical_arguments_are_refused_with_a_reason(value: Any) -> None:
    with pytest.raises(UncanonicalArgumentsError, match=r"no canonical form: .+ Send them as finite JSON"):
        key({"x": value})


def test_null_is_not_mistaken_for_nan() -> None:
    assert key({"x": None, "y": 1.5})


def test_private_keys_differ_by_rollout_and_turn() -> None:
    shared = call_key(ToolCall("shell", "exec", {"command": "ls"}))
    keys = {shared, *(private_key(shared, rollout, turn) for rollout in range(3) for turn in range(3))}
    assert len(keys) == 10


def test_root_keys_depend_on_spec_and_identity() -> None:
    assert len({root_key(b"{}", "a"), root_key(b"{} ", "a"), root_key(b"{}", "b")}) == 3
