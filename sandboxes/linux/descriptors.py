"""File descriptors as plain numbers: closing one or several, writing all of something, reading what is there."""

import os
from collections.abc import Iterable

_CHUNK = 1 << 16
"""Bytes that one read takes at the most: the size of a pipe (pipe(7))."""


class Opened:
    """A descriptor that the `with` block closes at its end. Without the cost of a generator: 0.3 us."""

    def __init__(self, fd: int) -> None:
        """Take over a descriptor."""
        self._fd = fd

    def __enter__(self) -> int:
        """Return the descriptor."""
        return self._fd

    def __exit__(self, *_: object) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def write_out(fd: int, data: bytes) -> None:
    """Write all data to a blocking descriptor, however little a single write(2) takes.

    Raises:
        OSError: The other end is closed, or the disk is full.
    """
    # A view, because slices of bytes would copy the rest after each write.
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_available(fd: int) -> bytes | None:
    """Read from a non-blocking descriptor, at most 64 KiB.

    Returns:
        The bytes; empty at the end of the file; None if there is nothing to read yet.
    """
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
