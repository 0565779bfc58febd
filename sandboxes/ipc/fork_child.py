"""The child's end of a fork server (`ipc.fork_server`): its socket, its requests, and shared memory.

This module loads the standard library only.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator

from sandboxes.ipc.frames import Inbox, IpcFrame, receive


def connect() -> socket.socket:
    """Return the socket to the driver, whose descriptor is the first argument, and close every other descriptor."""
    # An event loop may pass on more descriptors than it should. None of the driver's own may reach a sandbox.

    # `fileno=` takes the descriptor over without a duplicate.
    driver = socket.socket(fileno=int(sys.argv[1]))
    # Forks that become other programs must not hold the driver's socket.
    driver.set_inheritable(False)
    # The kernel's `close_range` makes this cheap whatever the limit is.
    os.closerange(3, driver.fileno())
    os.closerange(driver.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # Ctrl-C in the terminal reaches the whole process group. The driver handles it and ends its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return driver


def freeze_heap() -> None:
    """Keep the garbage collector away from all objects so far: it would write to pages that forks share."""
    # Once before the freeze, so that garbage is not kept for ever.
    gc.collect()
    gc.freeze()


def requests(driver: socket.socket) -> Iterator[IpcFrame]:
    """Yield requests until the driver closes its end or dies. Descriptors of a request are the caller's to close."""
    inbox = Inbox()
    while True:
        # The driver has closed its end, or died and the kernel closed it. Either way the child's work is over. With an
        # answer that it has not read, the end is a reset (unix(7)).
        try:
            data, fds = receive(driver)
        except ConnectionResetError:
            return
        if not data:
            return
        inbox.feed(data, fds)
        while (message := inbox.take()) is not None:
            yield message
