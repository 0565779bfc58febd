"""What is measured in pictures, sound and words: pure."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.video import measurements as measure
from sandboxes.video import prompts
from sandboxes.video import ranking as words

RED, GREEN = np.full((36, 64, 3), (230, 20, 20), np.uint8), np.full((36, 64, 3), (20, 150, 40), np.uint8)


def differences(*cut_at: int, count: int = 100, motion: float = 0.001) -> np.ndarray:
    found = np.full(count, motion, np.float32)
    found[0] = 0
    for n in cut_at:
        found[n] = 0.3
    return found


def times(count: int = 100) -> list[float]:
    return [n / 10 for n in range(count)]


def test_difference_ranges_from_zero_to_one() -> None:
    black, white = np.zeros_like(RED), np.full_like(RED, 255)
    assert measure.difference(RED, RED) == 0
    assert measure.difference(black, white) == 1
    # Of equal brightness, and yet far apart.
    assert measure.difference(RED, GREEN) > measure.CUT


def test_large_difference_is_a_cut() -> None:
    assert measure.cuts(times(), differences(20, 55)) == [2.0, 5.5]


def test_steady_movement_is_no_cut() -> None:
    wild = differences(30)
    wild[31:60] = np.linspace(0.14, 0.06, 29)
    assert measure.cuts(times(), wild) == [3.0]


def test_lively_video_raises_cut_threshold() -> None:
    assert measure.cuts(times(), differences(20, motion=0.03)) == [2.0]
    almost = differences(motion=0.03)
    almost[50] = 0.2
    assert measure.cuts(times(), almost) == []


def test_given_threshold_decides_alone() -> None:
    some = differences(20)
    some[70] = 0.04
    assert measure.cuts(times(), some, 0.03) == [2.0, 7.0]
    assert measure.cuts(times(), some, 0.5) == []


def test_shots_have_a_minimum_length() -> None:
    assert measure.cuts(times(), differences(1, 20, 21), 0.05) == [2.0]
    assert measure.cuts([], np.zeros(0, np.float32)) == []


@given(st.floats(0.1, 1e4), st.floats(0.5, 100))
def test_segments_cover_the_video(duration_s: float, segment_s: float) -> None:
    spans = measure.segments(duration_s, segment_s)
    assert spans[0][0] == 0
    assert spans[-1][1] == duration_s
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    assert all(end - start == pytest.approx(segment_s) for start, end in spans[:-1])
    last = spans[-1][1] - spans[-1][0]
    assert 0 < last <= 1.5 * segment_s + 1e-6


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=30, unique=True),
    st.lists(st.floats(0.5, 99), max_size=6, unique=True),
    st.floats(0, 100),
)
def test_nearest_kept_picture_of_the_shot_represents(kept: list[float], starts: list[float], t: float) -> None:
    kept.sort()
    shots = measure.spans(sorted(starts), 101.0)
    span = shots[measure.span_at([start for start, _ in shots], t)]
    assert span[0] <= t + 1e-5
    assert t < span[1]
    found = kept[measure.nearest(kept, span, t)]
    same = [k for k in kept if span[0] - 1e-6 <= k < span[1] - 1e-6] or kept
    assert found in same
    assert abs(found - t) == min(abs(k - t) for k in same)


def test_colours_have_names() -> None:
    assert measure.palette(RED) == ["red"]
    half = RED.copy()
    half[:20] = (20, 150, 40)
    assert measure.palette(half) == ["green", "red"]
    assert measure.brightness(np.full_like(RED, 255)) == pytest.approx(1)


@pytest.mark.parametrize("hz", [220, 440, 1000, 3000])
def test_tone_has_its_frequency(hz: int) -> None:
    t = np.arange(2 * measure.SAMPLE_RATE) / measure.SAMPLE_RATE
    tone = (np.sin(2 * np.pi * hz * t) * 16384).astype(np.int16)
    assert measure.tone_hz(tone) == pytest.approx(hz, abs=1)
    assert measure.level_db(tone) == pytest.approx(-9.03, abs=0.05)
    assert measure.peak_db(tone) == pytest.approx(-6.02, abs=0.05)


def test_noise_and_silence_have_no_tone() -> None:
    noise = np.random.default_rng(1).integers(-9000, 9000, 32_000).astype(np.int16)
    assert measure.tone_hz(noise) is None
    nothing = np.zeros(32_000, np.int16)
    assert (measure.tone_hz(nothing), measure.level_db(nothing)) == (None, measure.SILENCE_DB)
    assert measure.level_db(np.zeros(0, np.int16)) == measure.SILENCE_DB


def test_overlay_needs_two_alternating_shades() -> None:
    plain = np.full((240, 320), 90, np.uint8)
    assert measure.overlay(plain) is None
    written = plain.copy()
    written[200:220] = 20
    written[202:218, 100:220:6] = written[202:218, 101:220:6] = 250
    assert measure.overlay(written) == "lower"
    assert measure.overlay(written[::-1]) == "upper"
    bars = np.repeat(np.repeat(np.array([[20, 250] * 3], np.uint8), 240, 0), 53, 1)
    assert measure.overlay(bars) is None


def test_seek_pays_beyond_half_a_group() -> None:
    assert measure.seek_pays(100, 30)
    assert not measure.seek_pays(14, 30)
    # Three key pictures in 615: reading on is cheaper for most of the way.
    assert not measure.seek_pays(100, 205)
    assert not measure.seek_pays(0, 1)


def test_rare_words_count_more() -> None:
    lines = ["red wall", "red door", "blue door", ""]
    scores = words.bm25("blue door", lines)
    assert words.best(scores, 2) == [2, 1]
    assert scores[3] == scores[0] == 0
    assert words.bm25("nothing", lines) == [0, 0, 0, 0]
    assert words.bm25("x", []) == []


def test_equal_scores_are_ordered_by_number() -> None:
    assert words.best([1.0, 2.0, 2.0, 1.0], 4) == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("answer", "caption", "objects"),
    [
        ("A man walks.\nObjects: man, Dog , the  hat.", "A man walks.", ["man", "dog", "the hat"]),
        ("A man walks.", "A man walks.", []),
        ("**Objects:** cup; cup; `saucer`", "cup, saucer", ["cup", "saucer"]),
        ("A table.\nObjects: none", "A table.", []),
        ("The objects: in it shine", "The objects: in it shine", []),
    ],
)
def test_captions_and_objects_are_parsed(answer: str, caption: str, objects: list[str]) -> None:
    assert prompts.described(answer) == (caption, objects)


def test_memory_prompt_lists_segments_of_objects() -> None:
    asked = prompts.ask_memory({"cup": [0, 1, 2, 7], "man": [4]}, 9, 2.0, "Where is the cup?")
    assert "cup: 0-2, 7" in asked
    assert "man: 4" in asked
    assert asked.endswith("Where is the cup?")


def test_decibels_are_finite() -> None:
    assert math.isfinite(measure.level_db(np.array([0], np.int16)))
