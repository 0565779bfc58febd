"""Labels of every sender are bounded and kept in one form."""

from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.refusals import RefusalError
from proxy.tree.labels import MAX_LABELS, MAX_TEXT, MAX_VALUE_CHARS, changed, checked, inherited, parsed


def test_values_are_kept_as_texts_of_one_form() -> None:
    given_values = {"run": "r7", "step": "007", "epoch": 2, "reward": "1", "greedy": True, "lr": 0.5, "note": "ä<b>"}
    assert checked(given_values) == {
        "run": "r7", "step": "7", "epoch": "2", "reward": "1.0", "greedy": "true", "lr": "0.5", "note": "ä<b>",
    }  # fmt: skip


@pytest.mark.parametrize(
    "labels",
    [
        {"": "x"}, {"1a": "x"}, {"a b": "x"}, {'a"b': "x"}, {"a" * 65: "x"}, {"a\n": "x"},
        {"a": "x" * (MAX_VALUE_CHARS + 1)}, {"a": "two\nlines"}, {"a": "\x00"}, {"a": "\u202e"}, {"a": None}, {"a": []},
        {"step": -1}, {"step": 1.5}, {"step": True}, {"step": "x"}, {"epoch": 10**16},
        {"reward": "much"}, {"reward": float("nan")}, {"reward": float("inf")}, {"reward": True}, {"reward": 10**400},
        {f"l{n}": n for n in range(MAX_LABELS + 1)},
    ],
)  # fmt: skip
def test_malformed_labels_are_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(RefusalError) as refused:
        checked(labels)
    assert (refused.value.status, refused.value.slug) == (422, "labels")


def test_changes_set_and_remove_labels() -> None:
    assert changed({"run": "r", "note": "x"}, {"note": None, "reward": 1, "gone": None}) == {
        "run": "r",
        "reward": "1.0",
    }


def test_fork_takes_over_all_but_the_reward() -> None:
    assert inherited({"run": "r", "reward": "1.0"}) == {"run": "r"}


@given(st.dictionaries(st.from_regex(r"\A[a-d]{1,3}\Z"), st.text(max_size=20).filter(str.isprintable), max_size=8))
def test_text_of_a_header_becomes_its_labels(labels: dict[str, str]) -> None:
    text = ",".join(f"{name}={quote(value, safe='')}" for name, value in labels.items())
    assert parsed(text.encode()) == labels


@pytest.mark.parametrize("text", [b"run", b"=", b"a=%ff", b"\xff=1", b"a=" + b"x" * MAX_TEXT, b"a b=1"])
def test_malformed_text_is_refused(text: bytes) -> None:
    with pytest.raises(RefusalError) as refused:
        parsed(text)
    assert refused.value.slug == "labels"


def test_empty_parts_are_ignored() -> None:
    assert parsed(b" run = r7 , , step=3,") == {"run": "r7", "step": "3"}
