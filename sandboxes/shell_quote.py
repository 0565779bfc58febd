"""Quoting for POSIX shells.

`shlex.quote` leaves harmless words bare. This module always quotes, so that equal scripts are equal bytes whatever the
word, and guest code need not load `shlex` and `re`.
"""


def quote(text: str) -> str:
    """Return text as a single-quoted word of any POSIX shell.

    Args:
        text: Any text without NUL. Line breaks stay part of the word.
    """
    return "'" + text.replace("'", "'\\''") + "'"
