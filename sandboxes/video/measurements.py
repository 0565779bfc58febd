"""What is measured in pictures and sound (pure; the arrays are numpy's)."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SMALL = (64, 36)
"""Pictures are compared at this size, each pixel the mean of its area: a point sample would see edges move."""
CUT = 0.05
"""Difference of two pictures, of 1, from which on it may be a cut."""
_OVER_MEDIAN = 8.0
_STANDS_OUT = 2.0
_SHORTEST_SHOT_S = 0.3
SAMPLE_RATE = 16_000
SILENCE_DB = -90.0
_TINY_S = 1e-6

_COLOURS: dict[str, tuple[int, int, int]] = {
    "black": (0, 0, 0), "grey": (128, 128, 128), "white": (255, 255, 255), "red": (230, 20, 20),
    "orange": (250, 140, 20), "yellow": (250, 240, 30), "green": (20, 150, 40), "cyan": (30, 210, 210),
    "blue": (20, 40, 230), "purple": (130, 20, 140), "pink": (250, 150, 190), "brown": (110, 65, 25),
}  # fmt: skip
_NAMES = tuple(_COLOURS)
_POINTS = np.array(list(_COLOURS.values()), dtype=np.int32)
_SHOWN_SHARE = 0.12

MeasuredSpan = tuple[float, float]
Small = NDArray[np.uint8]
"""A picture of `SMALL`, as rows of pixels of red, green and blue."""


def difference(one: Small, other: Small) -> float:
    """Return how far two pictures are apart: the mean over pixels and colours, 0 to 1."""
    return float(np.abs(one.astype(np.int16) - other).mean()) / 255.0


def brightness(picture: Small) -> float:
    """Return the mean luma of a picture, 0 to 1 (ITU-R BT.601)."""
    red, green, blue = picture.reshape(-1, 3).mean(axis=0)
    return float(0.299 * red + 0.587 * green + 0.114 * blue) / 255.0


def palette(picture: Small) -> list[str]:
    """Return the names of the colours that an eighth of a picture or more is nearest to, the most frequent first."""
    pixels = picture.reshape(-1, 1, 3).astype(np.int32)
    nearest = ((pixels - _POINTS) ** 2).sum(axis=2).argmin(axis=1)
    counts = np.bincount(nearest, minlength=len(_NAMES))
    order = sorted(range(len(_NAMES)), key=lambda n: (-counts[n], n))
    return [_NAMES[n] for n in order if counts[n] >= _SHOWN_SHARE * len(nearest)]


def motion_word(motion: float) -> str:
    """Return a word for the mean difference of neighbouring pictures."""
    return next(
        word for limit, word in ((0.0015, "still"), (0.01, "calm"), (0.04, "moving"), (9, "fast")) if motion < limit
    )


def cuts(times: Sequence[float], differences: NDArray[np.float32], threshold: float | None = None) -> list[float]:
    """Return the times at which shots begin, the first one aside.

    A cut is a difference above threshold. By default that is `CUT`, or more where most pictures differ much: eight
    times the median of the whole video (of its neighbourhood would miss cuts between lively shots); and it is twice
    what was just before, which in wild movement it is not.
    """
    if len(differences) == 0:
        return []
    limit = max(CUT, _OVER_MEDIAN * float(np.median(differences))) if threshold is None else threshold
    found: list[float] = []
    for n in np.flatnonzero(differences > limit).tolist():
        if threshold is None and differences[n] < _STANDS_OUT * differences[max(0, n - 2) : n].max(initial=0.0):
            continue
        last = found[-1] if found else times[0]
        if n > 0 and times[n] - last >= _SHORTEST_SHOT_S:
            found.append(times[n])
    return found


def spans(starts: Sequence[float], end: float) -> list[tuple[float, float]]:
    """Return the spans between starts, the last one up to end; the first begins at 0."""
    return list(itertools.pairwise([0.0, *starts, end]))


def span_at(starts: Sequence[float], t: float) -> int:
    """Return the number of the span that t is in, of those that begin at starts."""
    return max(0, bisect_right(starts, t + _TINY_S) - 1)


def segments(duration_s: float, segment_s: float) -> list[tuple[float, float]]:
    """Return the segments of a video: of one length, but for the last, which is half as long to half as long again."""
    count = max(1, math.floor(duration_s / segment_s + 0.5))
    return [(n * segment_s, (n + 1) * segment_s if n < count - 1 else duration_s) for n in range(count)]


def nearest(kept: Sequence[float], span: MeasuredSpan, t: float) -> int:
    """Return which of the kept pictures, whose times rise, stands for t: the nearest within span, the shot of t.

    Where none of the shot was kept, it is the nearest of all.
    """
    low, high = bisect_left(kept, span[0] - _TINY_S), bisect_left(kept, span[1] - _TINY_S)
    if low == high:
        low, high = 0, len(kept)
    after = min(max(bisect_left(kept, t), low), high - 1)
    before = max(low, after - 1)
    return min(before, after, key=lambda n: (abs(kept[n] - t), n))


def evenly(start: float, end: float, count: int) -> list[float]:
    """Return count times between start and end, each in the middle of its share."""
    step = (end - start) / count
    return [start + (n + 0.5) * step for n in range(count)]


def level_db(samples: NDArray[np.int16]) -> float:
    """Return the mean loudness, in dB below full scale; `SILENCE_DB` where there is none."""
    return _db(math.sqrt(float(np.mean(samples.astype(np.float64) ** 2))) / 32768) if len(samples) else SILENCE_DB


def peak_db(samples: NDArray[np.int16]) -> float:
    """Return the loudest sample, in dB below full scale."""
    return _db(float(np.abs(samples.astype(np.int32)).max()) / 32768) if len(samples) else SILENCE_DB


def tone_hz(samples: NDArray[np.int16]) -> float | None:
    """Return the frequency that most of the sound's power is in; None where no single one stands out."""
    if len(samples) < SAMPLE_RATE // 4 or level_db(samples) < -60:
        return None
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))) ** 2
    power[: int(20 * len(samples) / SAMPLE_RATE) + 1] = 0
    top = int(power.argmax())
    around = power[max(0, top - 3) : top + 4].sum()
    return top * SAMPLE_RATE / len(samples) if around > 0.5 * power.sum() else None


def _db(amplitude: float) -> float:
    return SILENCE_DB if amplitude <= 0 else max(SILENCE_DB, 20 * math.log10(amplitude))


def seek_pays(ahead: float, mean_gop: float) -> bool:
    """Say whether to seek to a picture that is so many pictures ahead, rather than to read on to it.

    After a seek half a group of pictures is decoded on the way, on average; with few key pictures groups are long.
    """
    return ahead > max(1.0, mean_gop / 2)


def overlay(luma: NDArray[np.uint8]) -> str | None:
    """Return the edge of a picture, "lower" or "upper", near which something looks like a line of text; None for none.

    Text is rows of two shades far apart, changing from one to the other many times. What it says is not read.
    """
    height, width = luma.shape
    rows = luma.astype(np.int16)
    dark, light = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    two_shades = ((rows - dark < 45) | (light - rows < 45)).mean(axis=1) >= 0.8
    changes = (np.abs(np.diff(rows, axis=1)) > 50).sum(axis=1)
    text = (light - dark > 120)[:, 0] & two_shades & (changes >= 8) & (changes <= width // 3)
    low, high = text[int(0.6 * height) :], text[: int(0.3 * height)]
    for name, band in (("lower", low), ("upper", high)):
        if _longest_run(band) >= max(6, int(0.025 * height)):
            return name
    return None


def _longest_run(flags: NDArray[np.bool_]) -> int:
    return max((sum(1 for _ in group) for value, group in itertools.groupby(flags.tolist()) if value), default=0)
