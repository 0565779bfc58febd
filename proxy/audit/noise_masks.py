"""Noise masks: parts of an answer that an audit does not compare, chosen per task (pure)."""

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from proxy.patterns import BytesPattern, bytes_pattern

MaskName = Literal["dates", "pids", "addresses", "temp_names"]
_MAX_BYTES = 4 << 20
"""Largest answer that is masked: the named masks take about a second for this many bytes."""
_MAX_PATTERN_CHARS = 1000
"""Longest pattern of a task's own."""
_MAX_STEPS = 2_000
"""Largest sum of the programs of a task's own patterns: two minutes of a thread for the largest, worst answer."""

KNOWN: dict[MaskName, tuple[str, ...]] = {
    "dates": (
        r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|[+-]\d\d:?\d\d))?)?",
        r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? [ \w]{3,7} [ \d]\d \d\d:\d\d:\d\d(?: [A-Z]{3,4})? ?(?:\d{4})?",
        r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d (?:\d\d:\d\d|[ \d]\d{4})",
        r"\b\d\d:\d\d:\d\d(?:\.\d+)?\b",
        r"\b1[5-9]\d{8}(?:\.\d+)?\b",
        r"\b\d+\.\d+ ?(?:s|ms|seconds)\b",
    ),
    "pids": (r"(?i)\bpid[ =:]+\d+", r"\[\d+\] +\d+", r"\(\d{2,7}\)"),
    "addresses": (r"\b0x[0-9a-fA-F]{6,16}\b", r"\b(?:127\.0\.0\.1|localhost|0\.0\.0\.0):\d{2,5}\b"),
    "temp_names": (r"/tmp/[\w.+-]*[\w.+-]{6,}", r"\btmp[\w]{6,}\b"),  # noqa: S108 - a pattern of names
}
"""The patterns of each named mask. Any two texts that the same pattern matches count as equal."""


class Masks(BaseModel):
    """A task's masks: names of built-in ones, and at most 50 `patterns` of its own in the syntax of RE2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    masks: tuple[MaskName, ...] = ()
    patterns: tuple[str, ...] = Field(default=(), max_length=50)

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if len(pattern) > _MAX_PATTERN_CHARS:
                raise ValueError(f"a pattern may have at most {_MAX_PATTERN_CHARS} characters")
            # A PatternError is a ValueError, and its text says what to do.
            if bytes_pattern(pattern).match(b"") is not None:
                raise ValueError(f"{pattern[:80]!r} matches the empty text, so it would match everywhere")
        steps = sum(bytes_pattern(pattern).programsize for pattern in patterns)
        if steps > _MAX_STEPS:
            raise ValueError(f"the patterns have {steps} steps together, of {_MAX_STEPS}. Use fewer or shorter ones.")
        return patterns

    def expressions(self) -> list[BytesPattern]:
        """Return the patterns of all masks, compiled, the named ones first."""
        named: Iterable[str] = (pattern for name in sorted(set(self.masks)) for pattern in KNOWN[name])
        return [bytes_pattern(pattern) for pattern in (*named, *self.patterns)]


def masked(body: bytes, expressions: Iterable[BytesPattern]) -> bytes:
    """Return an answer's body with each match replaced by the number of its pattern; above 4 MiB it is unchanged."""
    if len(body) > _MAX_BYTES:
        return body
    for number, expression in enumerate(expressions):
        body = expression.sub(b"<masked %d>" % number, body)
    return body
