"""File descriptors as plain numbers: closing several, and what a pipe has to read."""

import os
from collections.abc import Iterable

_CHUNK = 1 << 16
"""Bytes that one read takes at the most: the size of a pipe (pipe(7))."""


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def read_available(fd: int) -> bytes | None:
    """Read from a non-blocking descriptor, at most 64 KiB.

    Returns:
        The bytes; empty at the end of the file; None if there is nothing to read yet.
    """
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
