"""Quoting for bash."""


def quote(text: str) -> str:
    """Return text as one word of bash."""
    return "'" + text.replace("'", "'\\''") + "'"
