"""Segments in words, and the ranking of segments by a description (pure)."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

_WORD = re.compile(r"[^\W_]+")
_K, _B = 1.2, 0.75
"""The parameters of BM25, with the values of its authors."""
NO_MODEL = "[no model]"
"""Begins texts that no model wrote, so that agents do not take measurements for descriptions."""


def line(segment: dict[str, Any], subtitles: Sequence[str]) -> str:
    """Return the measurements of a segment in words."""
    parts = [f"{NO_MODEL} shot {segment['first_shot']}"]
    if segment["last_shot"] != segment["first_shot"]:
        parts[0] += f" to {segment['last_shot']}"
    parts.append("colours " + (", ".join(segment["palette"]) or "mixed"))
    parts.append(f"picture {segment['motion_word']}, brightness {segment['brightness']:.2f}")
    if segment["overlay"]:
        parts.append(f"something like text near the {segment['overlay']} edge")
    parts.append(_sound(segment))
    if subtitles:
        parts.append(f"subtitle {' / '.join(subtitles)!r}")
    return "; ".join(parts)


def _sound(segment: dict[str, Any]) -> str:
    if segment["level_db"] is None:
        return "no sound track"
    if segment["level_db"] <= -60:
        return "silence"
    tone = f", tone {segment['tone_hz']:.0f} Hz" if segment["tone_hz"] is not None else ""
    return f"sound {segment['level_db']:.0f} dB, peak {segment['peak_db']:.0f} dB{tone}"


def tokens(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def bm25(query: str, lines: Sequence[str]) -> list[float]:
    """Return how well each line fits a query by BM25 (Robertson and Zaragoza, 2009); 0 for no common word."""
    documents = [Counter(tokens(text)) for text in lines]
    lengths = [sum(words.values()) for words in documents]
    mean = sum(lengths) / len(lengths) if lines else 1.0
    scores = [0.0] * len(lines)
    for word in dict.fromkeys(tokens(query)):
        having = sum(word in words for words in documents)
        weight = math.log(1 + (len(lines) - having + 0.5) / (having + 0.5))
        for n, words in enumerate(documents):
            often = words[word]
            scores[n] += weight * often * (_K + 1) / (often + _K * (1 - _B + _B * lengths[n] / (mean or 1)))
    return scores


def best(scores: Sequence[float], k: int) -> list[int]:
    """Return the numbers of the k highest scores; of equal ones, the lower number comes first."""
    return sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:k]
