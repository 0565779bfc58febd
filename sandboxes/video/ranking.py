"""Lines about segments in words, and which of them a description fits best (pure)."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

_WORD = re.compile(r"[^\W_]+")
_K, _B = 1.2, 0.75
"""Of BM25, as its authors have them."""
NO_MODEL = "[no model]"


def line(segment: dict[str, Any], subtitles: Sequence[str]) -> str:
    """Return what was measured in a segment, in words. It says nothing that was not."""
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
    return _WORD.findall(text.lower())


def bm25(query: str, lines: Sequence[str]) -> list[float]:
    """Return how well each line fits query, 0 for not at all (Robertson and Zaragoza, 2009)."""
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
    """Return the numbers of the k highest scores, the lower number first where two are equal."""
    return sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:k]
