"""The keeper launcher: the process that every container's keeper is forked from.

It runs as root on the machine of the Docker daemon, in a mount namespace of its own, so that what keepers mount stays
invisible to everybody else. It has one thread and few imports, so that a fork is cheap and safe. It exits when the
driver's end of its socket closes.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
from pathlib import Path

from sandboxes.container.keeper import keeper
from sandboxes.container.orphans import kill_newcomers
from sandboxes.ipc.codec import decode, pack_message, prepare
from sandboxes.ipc.fork_child import connect, freeze_heap, requests
from sandboxes.ipc.launch_messages import Forked, ForkKeeper, ForkServerReady
from sandboxes.ipc.messages import Failed
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.cgroups import move_to_roots
from sandboxes.linux.descriptors import close_all

CONTAINER_MARK = Path("/.dockerenv")
"""Docker makes this file in every container."""


def _serve(driver: socket.socket) -> set[str]:
    """Fork a keeper for each request, until the driver is gone; return the names of the boxes that got a keeper."""
    kept: set[str] = set()
    for frame in requests(driver):
        request, _, fds = decode(frame)
        assert isinstance(request, ForkKeeper), "nothing else is sent to this process"
        kept.add(Path(request.box).parent.name)
        pid = os.fork()
        if pid == 0:
            driver.close()
            # Without the launcher's own socket: a keeper that held it would keep the driver from seeing the launcher's
            # end.
            _become_keeper(request, fds[0])
        close_all(fds)
        # A driver that is gone reads no reply; the next read says so.
        with contextlib.suppress(OSError):
            driver.sendall(pack_message(Forked()))
    return kept


def _become_keeper(request: ForkKeeper, channel: int) -> None:
    try:
        keeper.run(channel, request)
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: tell the driver, then end
        with contextlib.suppress(OSError):
            os.write(channel, pack_message(Failed(f"{type(error).__name__}: {error}")))
    finally:
        # _exit: no handler of the launcher's may run in its fork.
        os._exit(0)


def main() -> None:
    """Run the keeper launcher. Arguments: the socket's descriptor, and the directory of the boxes."""
    driver, boxes = connect(), Path(sys.argv[2])
    # The kernel reaps keepers; the driver sees their channels close.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        # A new mount namespace still shares its mounts' events with the old one until they are private
        # (mount_namespaces(7)).
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        driver.sendall(pack_message(Failed(str(error))))
        return
    if CONTAINER_MARK.exists():
        # When the proxy's own container is killed, this process and its keepers live on until they have ended the
        # sandboxes: their sockets to the proxy close.
        move_to_roots()
    prepare()
    # Garbage collection in a fork would write to pages that it shares with this process, and so copy them.
    freeze_heap()
    gc.disable()
    driver.sendall(pack_message(ForkServerReady()))
    kept = _serve(driver)
    # A proxy that stops has removed its boxes by now. If there are some it died, and Docker may still be starting
    # containers that it started, which no keeper waits for. The parent's pid would not tell: a process that dies
    # closes its sockets before its children get another parent.
    with contextlib.suppress(OSError):
        kill_newcomers(boxes, kept)


if __name__ == "__main__":
    main()
