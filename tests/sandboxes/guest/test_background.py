"""Background processes, without a sandbox."""

import os
from typing import Any

from sandboxes.guest.background import BackgroundProcess, BackgroundProcesses, pending_outputs
from sandboxes.ipc.messages import UseBackgroundProcess
from sandboxes.process_output import ERR, OUT, ending, output

DESCRIPTION = {"process": 7, "argv": ["server"], "env": {}, "cwd": "/", "tag": ""}
DEAD = 1


def test_exit_codes_are_not_read_between_calls() -> None:
    """A dump that waits for pid 1 holds the anchor still: a question to the anchor would wait for the dump."""
    reads: list[Any] = []

    def status() -> int:
        reads.append(None)
        return 3

    background = BackgroundProcesses(1 << 20)
    streams, death = pending_outputs(ended_with(b"last words")), os.eventfd(DEAD, os.EFD_CLOEXEC)
    background.add(BackgroundProcess(DESCRIPTION, streams, -1, death, 4711, status))
    for _ in range(3):
        background.drain()
    assert reads == []
    code, _, body = background.perform(UseBackgroundProcess("attend", {"process": 7}, 1.0), b"")
    assert (code, output(body, OUT), ending(body).exit_code, reads) == (200, b"last words", 3, [None])


def ended_with(text: bytes) -> dict[int, int]:
    """Return our ends of the streams of a process that has said text, and has ended."""
    ours = {}
    for place in (OUT, ERR):
        ours[place], theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.write(theirs, text if place == OUT else b"")
        os.close(theirs)
    return ours
