"""Output of tools and agents, escaped for the terminal. Pure."""

ELLIPSIS = "…"
SIGNS = {"\n": "⏎", "\t": "→"}


def printable(text: str) -> str:
    """Return text in one line, without characters that control a terminal: they become visible signs or escapes."""
    return "".join(
        SIGNS.get(sign) or (sign if sign.isprintable() else sign.encode("unicode_escape").decode()) for sign in text
    )


def shortened(text: str, width: int) -> str:
    """Return the printable text, cut to at most `width` characters."""
    # Every character becomes at least one, so the rest of what may be megabytes need not be escaped.
    line = printable(text[: width + 1])
    return line if len(line) <= width else line[: width - 1] + ELLIPSIS
