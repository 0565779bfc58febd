"""Tests that use up what all processes of the machine's user share run alone, whatever process runs the others."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Wait until no test runs alone; until no test runs at all, for one that has to be `alone`."""
    folder = Path(tempfile.gettempdir(), f"forkpoint-turns-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with (folder / "gate").open("w") as gate, (folder / "running").open("w") as running:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        # Whoever waits for the others to end holds the gate, so that no new ones begin meanwhile.
        fcntl.flock(gate, kind)
        fcntl.flock(running, kind)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield
