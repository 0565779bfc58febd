"""Requests to a process that starts others, and its answers: lines with a number, over two pipes."""

import os
import select
import time

from sandboxes.guest.bash import session as session_texts
from sandboxes.linux.descriptors import unread_bytes, write_out

PATIENCE_S = 10.0
"""How long an answer may take. It takes a millisecond; an agent that stops the process makes this time pass."""


class AnchorLostError(Exception):
    """The process is gone or gives no answer, because the agent has killed or stopped it."""


class Starter:
    """Pid 1's end of the two pipes, requests first. Requests to a process that is gone raise `AnchorLostError`."""

    def __init__(self, ends: tuple[int, int], death: int | None = None) -> None:
        """Take over the pipes. `death` is readable once the process has ended; None if its pipe ends with it."""
        self.ends, self._death = ends, death
        self._buffer = b""

    @property
    def has_unread(self) -> bool:
        """Whether there is an answer that was not asked for, such as the note of a fork on a busy machine."""
        return unread_bytes(self.ends[1]) > 0

    def ask(self, request: bytes) -> int:
        """Send a request, and return the answer."""
        self.send(request)
        return self.receive()

    def send(self, request: bytes) -> None:
        """Send a request. An answer that nothing asked for raises `AnchorLostError`."""
        try:
            if unread_bytes(self.ends[1]):
                raise AnchorLostError("it answers unasked")
            write_out(self.ends[0], request)
        except OSError as error:
            raise AnchorLostError(str(error)) from error

    def receive(self) -> int:
        """Return the next answer."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            poll = select.poll()
            poll.register(self.ends[1], select.POLLIN)
            if self._death is not None:
                poll.register(self._death, select.POLLIN)
            while b"\n" not in self._buffer:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not (events := dict(poll.poll(remaining_s * 1000))):
                    raise AnchorLostError("it gives no answer")
                if self.ends[1] not in events:
                    raise AnchorLostError("it ended")
                data = os.read(self.ends[1], 1 << 12)
                if not data:
                    raise AnchorLostError("it ended")
                self._buffer += data
        except OSError as error:
            raise AnchorLostError(str(error)) from error
        answer, _, self._buffer = self._buffer.partition(b"\n")
        # The agent may have written to the pipe of a bash through /proc. What is no number is not trusted.
        if (number := session_texts.number(answer.decode("latin-1"))) is None:
            raise AnchorLostError("it answers nonsense")
        return number
