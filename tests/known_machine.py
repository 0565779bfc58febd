"""What drivers find out about this machine, found out once in each process of the tests.

1. What not everybody may read of its system: 57,000 files are looked at for each new data directory.
2. Whether CRIU works on its kernel: `criu check` runs for each driver that keeps live processes.
"""

from contextlib import suppress
from functools import cache
from pathlib import Path

from sandboxes.local import host_base
from snapshots.criu import binary

_walk, _probe = host_base._unreadable, binary._probe_kernel


@cache
def _found(top: str) -> tuple[str, ...]:
    return tuple(_walk(top))


def remember() -> None:
    """Have drivers of this process, and of its forks, use what was found first."""
    host_base.__dict__["_unreadable"] = lambda top: iter(_found(top))
    binary.__dict__["_probe_kernel"] = cache(_probe)


def forget() -> None:
    """Have drivers of this process look: it may have lost the right to."""
    host_base.__dict__["_unreadable"] = _walk
    binary.__dict__["_probe_kernel"] = _probe


def look() -> None:
    """Look now, for forks that are made later."""
    for name in host_base.SEARCHED:
        _found(f"/{name}")
    for path in map(Path, binary._PATHS):
        # Where it does not work, each driver finds out for itself.
        with suppress(binary.CriuMissingError):
            if path.is_file():
                binary._probe_kernel(path)
