"""Measurements of pictures and sound (pure; the arrays are NumPy's)."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SMALL = (64, 36)
"""Width and height at which pictures are compared. Each pixel is the mean of its area, so that moving edges count
little."""
CUT = 0.05
"""Difference of two pictures, 0 to 1, above which a cut may lie between them."""
_OVER_MEDIAN = 8.0
"""How many times the median difference of the video a cut must exceed."""
_STANDS_OUT = 2.0
"""How many times the differences just before it a cut must exceed."""
_MIN_SHOT_S = 0.3
"""Shortest shot. Flashes and dissolves would make many otherwise."""
SAMPLE_RATE = 16_000
SILENCE_DB = -90.0
"""Level of silence, which has no finite one."""
_EPSILON_S = 1e-6
"""Times closer than this are equal."""

_COLOURS: dict[str, tuple[int, int, int]] = {
    "black": (0, 0, 0), "grey": (128, 128, 128), "white": (255, 255, 255), "red": (230, 20, 20),
    "orange": (250, 140, 20), "yellow": (250, 240, 30), "green": (20, 150, 40), "cyan": (30, 210, 210),
    "blue": (20, 40, 230), "purple": (130, 20, 140), "pink": (250, 150, 190), "brown": (110, 65, 25),
}  # fmt: skip
_NAMES = tuple(_COLOURS)
_POINTS = np.array(list(_COLOURS.values()), dtype=np.int32)
_MIN_SHARE = 0.12
"""Smallest share of the pixels that puts a colour into the palette."""

MeasuredSpan = tuple[float, float]
Small = NDArray[np.uint8]
"""A picture of size `SMALL`: rows of pixels of red, green and blue."""


def difference(first: Small, second: Small) -> float:
    """Return the difference of two pictures, 0 to 1: the mean over all pixels and colours."""
    return float(np.abs(first.astype(np.int16) - second).mean()) / 255.0


def brightness(picture: Small) -> float:
    """Return the mean luma of a picture, 0 to 1 (ITU-R BT.601)."""
    red, green, blue = picture.reshape(-1, 3).mean(axis=0)
    return float(0.299 * red + 0.587 * green + 0.114 * blue) / 255.0


def palette(picture: Small) -> list[str]:
    """Return the names of the main colours of a picture, the most frequent first."""
    pixels = picture.reshape(-1, 1, 3).astype(np.int32)
    nearest = ((pixels - _POINTS) ** 2).sum(axis=2).argmin(axis=1)
    counts = np.bincount(nearest, minlength=len(_NAMES))
    order = sorted(range(len(_NAMES)), key=lambda n: (-counts[n], n))
    return [_NAMES[n] for n in order if counts[n] >= _MIN_SHARE * len(nearest)]


def motion_word(motion: float) -> str:
    """Return a word for the mean difference of neighbouring pictures."""
    return next(
        word for limit, word in ((0.0015, "still"), (0.01, "calm"), (0.04, "moving"), (9, "fast")) if motion < limit
    )


def cuts(times: Sequence[float], differences: NDArray[np.float32], threshold: float | None = None) -> list[float]:
    """Return the times at which shots begin, without the first shot.

    A cut is a difference above a threshold: `CUT`, or eight times the whole video's median if that is more. (The median
    of the neighbourhood would miss cuts between lively shots.) It must also be twice the differences just before it,
    which steady movement is not. A threshold of the agent's decides alone.
    """
    if len(differences) == 0:
        return []
    limit = max(CUT, _OVER_MEDIAN * float(np.median(differences))) if threshold is None else threshold
    starts: list[float] = []
    for n in np.flatnonzero(differences > limit).tolist():
        if threshold is None and differences[n] < _STANDS_OUT * differences[max(0, n - 2) : n].max(initial=0.0):
            continue
        last = starts[-1] if starts else times[0]
        if n > 0 and times[n] - last >= _MIN_SHOT_S:
            starts.append(times[n])
    return starts


def spans(starts: Sequence[float], end: float) -> list[tuple[float, float]]:
    """Return the spans between starts. The first span begins at 0, and the last one ends at `end`."""
    return list(itertools.pairwise([0.0, *starts, end]))


def span_at(starts: Sequence[float], t: float) -> int:
    """Return the number of the span that contains a time, given the starts of all spans."""
    return max(0, bisect_right(starts, t + _EPSILON_S) - 1)


def segments(duration_s: float, segment_s: float) -> list[tuple[float, float]]:
    """Return the segments of a video. All have one length, except the last, which may be half shorter or longer."""
    count = max(1, math.floor(duration_s / segment_s + 0.5))
    return [(n * segment_s, (n + 1) * segment_s if n < count - 1 else duration_s) for n in range(count)]


def nearest(kept: Sequence[float], span: MeasuredSpan, t: float) -> int:
    """Return the number of the kept picture that represents a time: the nearest one of the same shot, else of all."""
    low, high = bisect_left(kept, span[0] - _EPSILON_S), bisect_left(kept, span[1] - _EPSILON_S)
    if low == high:
        low, high = 0, len(kept)
    after = min(max(bisect_left(kept, t), low), high - 1)
    before = max(low, after - 1)
    return min(before, after, key=lambda n: (abs(kept[n] - t), n))


def evenly(start: float, end: float, count: int) -> list[float]:
    """Return evenly spaced times between start and end, each in the middle of its share."""
    step = (end - start) / count
    return [start + (n + 0.5) * step for n in range(count)]


def level_db(samples: NDArray[np.int16]) -> float:
    """Return the mean level in dB relative to full scale, at least `SILENCE_DB`."""
    return _db(math.sqrt(float(np.mean(samples.astype(np.float64) ** 2))) / 32768) if len(samples) else SILENCE_DB


def peak_db(samples: NDArray[np.int16]) -> float:
    """Return the peak level in dB relative to full scale, at least `SILENCE_DB`."""
    return _db(float(np.abs(samples.astype(np.int32)).max()) / 32768) if len(samples) else SILENCE_DB


def tone_hz(samples: NDArray[np.int16]) -> float | None:
    """Return the frequency that holds more than half of the power; None if there is none, or the sound is too quiet."""
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
    """Return whether it is cheaper to seek to a picture than to decode the `ahead` pictures up to it."""
    # After a seek, half a group of pictures is decoded on average before the wanted one.
    return ahead > max(1.0, mean_gop / 2)


def overlay(luma: NDArray[np.uint8]) -> str | None:
    """Return the edge, "lower" or "upper", near which a picture seems to have a line of text; None for neither."""
    # Rows of text have two shades that are far apart and alternate often. The text itself is not read.
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
