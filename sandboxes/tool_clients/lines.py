"""Lines of a stream that comes in pieces (pure)."""


class Lines:
    """Cuts a stream into lines. Each byte is looked at once, however long its line is."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines, without their ends, that the next piece completes."""
        first, *more = data.split(b"\n")
        self._rest += first
        if not more:
            return []
        *lines, rest = bytes(self._rest), *more
        self._rest = bytearray(rest)
        return lines
