"""Noise masks hide their noise and no other difference."""

import pytest

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
