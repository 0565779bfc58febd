"""Walks this machine's own system once in each process of the tests, for half a second of CPU.

A driver walks it for each new data directory, to find what sandboxes must not see.
"""

from functools import cache

from sandboxes.local import host_base

_walk = host_base._unreadable


@cache
def _known(top: str) -> tuple[str, ...]:
    return tuple(_walk(top))


def remember() -> None:
    """Have drivers of this process, and of its forks, use what the first walk of a directory finds."""
    host_base.__dict__["_unreadable"] = lambda top: iter(_known(top))


def forget() -> None:
    """Have drivers of this process walk: it may have lost the right to."""
    host_base.__dict__["_unreadable"] = _walk


def walk() -> None:
    """Walk now, for forks that are made later."""
    for name in host_base.SEARCHED:
        _known(f"/{name}")
