"""Noise masks hide their noise and no other difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit.noise_masks import Masks, masked


@pytest.mark.parametrize(
    ("mask", "one", "other"),
    [
        ("dates", "at 2026-11-21T19:00:01Z ok", "at 2025-01-02 03:04:05 ok"),
        ("dates", "Sat Nov 21 18:46:29 UTC 2026", "Mon Jan  5 01:02:03 UTC 2026"),
        ("dates", "3 passed in 0.12s", "3 passed in 1.07s"),
        ("dates", "-rw-r--r-- 1 root root 2 Nov 21 18:46 f", "-rw-r--r-- 1 root root 2 Jan  5 01:02 f"),
        ("pids", "[1] 4242", "[1] 17"),
        ("addresses", "<object at 0x7f1234abcdef>", "<object at 0x7f00deadbeef>"),
        ("temp_names", "wrote /tmp/tmpab12cd_x/out", "wrote /tmp/tmpzz99yy_q/out"),
    ],
)
def test_a_mask_hides_only_its_noise(mask: str, one: str, other: str) -> None:
    expressions = Masks(masks=(mask,)).expressions()  # type: ignore[arg-type]
    assert masked(one.encode(), expressions) == masked(other.encode(), expressions)
    assert masked(one.encode(), []) != masked(other.encode(), [])
    assert masked(b"1 failed", expressions) != masked(b"2 failed", expressions)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+$", "(a*)*c", "^(a|a)*b", "(.*a){20}b", "(x+x+)+y"])
def test_no_pattern_takes_more_than_linear_time(pattern: str) -> None:
    """Each of these takes `re` longer than the age of the universe on this answer."""
    assert masked(b"a" * 100_000, Masks(patterns=(pattern,)).expressions()) != b""


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(a)\1", "back-references"), ("(?=a)b", "look-around"), ("(?<!a)b", "look-around"), ("a{1001}", "a pattern"),
        ("[", "not a pattern"), ("(?P<n", "not a pattern"), ("x{900}y{900}", "too large"),
        ("a*", "empty text"), ("\udc80", "not text"),
    ],
)  # fmt: skip
def test_unusable_patterns_are_refused_with_a_sentence(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Masks(patterns=(pattern,))


def test_patterns_are_bounded_together() -> None:
    with pytest.raises(ValueError, match="steps together"):
        Masks(patterns=tuple(f"{letter}{{400}}" for letter in "abcdefghi"))


@given(st.text(max_size=30), st.binary(max_size=200))
def test_any_pattern_is_used_or_refused(pattern: str, body: bytes) -> None:
    try:
        expressions = Masks(patterns=(pattern,)).expressions()
    except ValueError:
        return
    masked(body, expressions)
