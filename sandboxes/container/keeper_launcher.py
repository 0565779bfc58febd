"""The process that every keeper is forked from: root on the machine of the containers. One thread, few imports.

It ends when the driver's end of its socket closes.
"""

import contextlib
import gc
import os
import signal
import socket
import sys

from sandboxes.container import keeper
from sandboxes.ipc.frames import Inbox, Message, pack, receive
from sandboxes.linux import syscalls as kernel


def _serve(driver: socket.socket) -> None:
    inbox = Inbox()
    while True:
        data, fds = receive(driver)
        if not data:
            return
        inbox.feed(data, fds)
        while (message := inbox.take()) is not None:
            pid = os.fork()
            if pid == 0:
                driver.close()
                _become_keeper(message)
            for fd in message.fds:
                os.close(fd)
            driver.sendall(pack({"pid": pid}))


def _become_keeper(message: Message) -> None:
    channel = message.fds[0]
    try:
        keeper.run(channel, message.fields)
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: tell the driver, then end
        with contextlib.suppress(OSError):
            os.write(channel, pack({"error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(0)


def main() -> None:
    """Serve on the descriptor that argv names."""
    driver = socket.socket(fileno=int(sys.argv[1]))
    driver.set_inheritable(False)
    os.closerange(3, driver.fileno())
    os.closerange(driver.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # The terminal's Ctrl-C is for the driver, who closes the sandboxes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Children are reaped by the kernel; the driver sees their channels end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        driver.sendall(pack({"error": str(error)}))
        return
    # Forked memory stays shared as long as nobody writes to it; the collector would.
    gc.collect()
    gc.freeze()
    gc.disable()
    driver.sendall(pack({"ready": True}))
    _serve(driver)


if __name__ == "__main__":
    main()
