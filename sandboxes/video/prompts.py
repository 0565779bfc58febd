"""The prompts for models, and the parsing of their answers (pure)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

VERSION = 1
"""Version of the prompts, part of the names of captions. Raise it with every change of `DESCRIBE`."""
_MAX_OBJECTS = 40
"""Most objects of one segment."""
_MAX_OBJECT_LENGTH = 60
"""Longest name of an object in characters; a longer one is a sentence."""
_SPLIT = re.compile(r"^\s*\**objects?\**\s*:\**", re.IGNORECASE | re.MULTILINE)

DESCRIBE = (
    "This is a picture of a video, from the segment {start:.1f} s to {end:.1f} s. Say in one sentence what is seen and "
    "done, with any text that can be read. Then, on a line of its own that begins with `Objects:`, name the things and "
    "people seen, in the singular, separated by commas."
)
QUESTION = (
    "These pictures are from a video, in order, around the segment {start:.1f} s to {end:.1f} s. It was described so: "
    "{caption}\nAnswer this question from what is seen; say that it cannot be seen where it cannot: {question}"
)
MEMORY = (
    "In a video of {segments} segments of {segment_s:g} s each, numbered from 0, these things were seen, each in the "
    "segments behind it:\n{objects}\n"
    "Answer this question from that list alone; say so where it does not tell: {question}"
)


def described(answer: str) -> tuple[str, list[str]]:
    """Return the caption and the objects of an answer to `DESCRIBE`. A model may leave out the objects."""
    sentence, *rest = _SPLIT.split(answer, maxsplit=1)
    caption = " ".join(sentence.split())
    if not rest:
        return caption, []
    names = (" ".join(name.split()).strip(" .*-_`'\"").lower() for name in re.split(r"[,;\n]", rest[0]))
    objects = dict.fromkeys(name for name in names if name and name != "none" and len(name) <= _MAX_OBJECT_LENGTH)
    return caption or ", ".join(objects), list(objects)[:_MAX_OBJECTS]


def ask_about(segment: Mapping[str, Any], question: str) -> str:
    """Return the prompt for a question about a segment."""
    return QUESTION.format(
        start=segment["start_s"], end=segment["end_s"], caption=segment["caption"], question=question
    )


def ask_memory(objects: Mapping[str, Sequence[int]], segments: int, segment_s: float, question: str) -> str:
    """Return the prompt for a question about all objects of a video."""
    lines = [f"{name}: {_ranges(seen)}" for name, seen in objects.items()]
    listed = "\n".join(lines) or "(nothing)"
    return MEMORY.format(segments=segments, segment_s=segment_s, objects=listed, question=question)


def _ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as text, with neighbours joined: 1-3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
