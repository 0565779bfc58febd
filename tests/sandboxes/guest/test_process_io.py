"""A process of its own that has ended before anybody looks at it."""

import os
import socket
import subprocess
import time

import pytest

from sandboxes.guest.process_io import Running, new_pipes


@pytest.mark.parametrize(
    ("printed", "detach", "ending"),
    [(b"", True, "detached"), (b"cannot be started", True, "ended"), (b"", False, "ended")],
)
def test_a_process_that_has_ended(printed: bytes, detach: bool, ending: str) -> None:
    """One that was started detached has been started, unless it says that it could not be."""
    ours, theirs = new_pipes(stdin=False)
    child = subprocess.Popen("true")
    death = os.pidfd_open(child.pid)
    child.wait()
    os.write(theirs[1], printed)
    for fd in theirs.values():
        os.close(fd)
    link, proxy = socket.socketpair()
    with link, proxy:
        process = Running(ours, b"", death, link)
        until = time.monotonic() + 60
        told = process.pump(until, link.fileno(), link.fileno(), lambda: None, lambda: False, detach=detach)
        assert (told, process.conclude(told, lambda: 0, 0)) == (ending, None if ending == "detached" else 0)
