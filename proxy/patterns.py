r"""Patterns of users: regular expressions by RE2, whose time is linear in the text. The one door to RE2.

Python's `re` backtracks: `(a+)+b` takes exponential time, and holds the interpreter's lock meanwhile.
"""

import re
from typing import Protocol

import re2

MAX_STEPS = 1_000
"""Largest program that a pattern compiles to. For the worst texts RE2 takes 15 ns for each step and byte (measured)."""
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
# Bytes are matched one by one, so answers need not be UTF-8.
_OPTIONS.encoding = re2.Options.Encoding.LATIN1


class PatternError(ValueError):
    """The pattern is malformed, too large, or uses what RE2 does not know."""


class BytesPattern(Protocol):
    """A compiled pattern of bytes; `programsize` is the number of its program's steps."""

    programsize: int

    def sub(self, replacement: bytes, text: bytes, /) -> bytes:
        """Return a text with every match replaced."""
        ...

    def match(self, text: bytes, /) -> object | None:
        """Return the match at the start of a text; None if there is none."""
        ...


def bytes_pattern(pattern: str) -> BytesPattern:
    """Return a compiled pattern, which matches the UTF-8 of its characters. Raises PatternError."""
    try:
        compiled: BytesPattern = re2.compile(pattern.encode(), _OPTIONS)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "it cannot be compiled"
        raise PatternError(
            f"{pattern[:80]!r} is not a pattern of RE2: {reason}. RE2 has no look-around and no back-references."
        ) from None
    except UnicodeEncodeError:
        raise PatternError(f"{pattern[:80]!r} is not text") from None
    if compiled.programsize > MAX_STEPS:
        raise PatternError(
            f"{pattern[:80]!r} is too large: it has {compiled.programsize} steps of {MAX_STEPS}. Repeat less, as in x+."
        )
    return compiled


class PathPattern(Protocol):
    """A compiled pattern of paths, of `re` or of RE2."""

    def fullmatch(self, text: str, /) -> "PathMatch | None":
        """Return the match of a whole path; None if it does not match."""
        ...


class PathMatch(Protocol):
    """A match of a path."""

    def groupdict(self) -> dict[str, str]:
        """Return the texts of the named parts."""
        ...


def path_pattern(pattern: str, *, ambiguous: bool) -> PathPattern:
    """Return a compiled pattern of paths, from literal text, `[^/]*`, `[^/]+` and `.*`.

    Where a text can match in several ways, `re` may take more than linear time; the others keep it, as RE2 is slower.
    """
    compiled: PathPattern = re2.compile(pattern) if ambiguous else re.compile(pattern)
    return compiled
