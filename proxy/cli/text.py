"""Text of tools and agents, made fit for a terminal (pure)."""

ELLIPSIS = "…"
NAMED = {"\n": "⏎", "\t": "→"}


def printable(text: str) -> str:
    """Return text in one line without anything that a terminal acts on.

    Line ends and tabs become signs; every other character that is not printable (escape sequences, carriage returns,
    C1 controls, direction marks, invisible spaces) is written as its Python escape.
    """
    return "".join(
        NAMED.get(sign) or (sign if sign.isprintable() else sign.encode("unicode_escape").decode()) for sign in text
    )


def shortened(text: str, width: int) -> str:
    """Return printable(text) in at most width characters, the end cut."""
    # A character becomes ten at most, so the rest need not be looked at: a tool may have printed megabytes.
    line = printable(text[: width + 1])
    return line if len(line) <= width else line[: width - 1] + ELLIPSIS
