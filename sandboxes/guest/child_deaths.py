"""A descriptor that wakes pid 1 when one of its children ends."""

import os
import signal

from sandboxes.linux.descriptors import read_available


class ChildDeaths:
    """Wakes a `poll` for each child of this process that ends.

    In a sandbox that a checkpoint brought back, pid 1 can be the parent of a daemon: CRIU makes the leader of the
    daemon's session again, and the daemon is an orphan when that leader ends. Then pid 1 has to collect the daemon as
    promptly as the anchor does, because programs look whether the pid is gone.
    """

    def __init__(self) -> None:
        """Begin to wake. A process can have one such object only."""
        self._reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The signal has to have a handler, or the interpreter writes nothing to the pipe.
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        """Return the descriptor, for `select.poll`."""
        return self._reading

    def clear(self) -> None:
        """Forget what came, before the children are collected."""
        read_available(self._reading)
