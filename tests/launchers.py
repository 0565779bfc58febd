"""Has the launchers of drivers in the tests' own process forked by one process that has loaded everything.

A launcher that is executed takes 0.1 s of CPU for its imports, and most tests of sandboxes have one of their own.
Proxies that run as processes, and users without root's rights, execute theirs all the same. This module is loaded
without installed packages too: the process that forks is one like a launcher.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from typing import Any

from sandboxes.ipc import fork_server
from sandboxes.ipc.launched_process import LaunchedProcess
from sandboxes.local import launcher

_CLONE, _CLONE_PARENT = 56, 0x8000
"""The number of clone(2) on x86-64, and the flag by which a child is the caller's sibling: tests wait for it."""
_MODULE = launcher.__name__
_MESSAGE_BYTES = 1 << 16

_execute = fork_server.ForkServer._start_process


class _Launched(LaunchedProcess):
    """A launcher that this process has to collect, because it is a child of it."""

    async def wait(self) -> int:
        """Return when the process has ended, and was collected."""
        await super().wait()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended
        return 0


@cache
def _forking(_pid: int) -> socket.socket:
    """Start the process that forks, for the process with a pid; it ends when that one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            fork_server.command_of(__name__, theirs.fileno(), ()), pass_fds=[theirs.fileno()], cwd="/",
            env=fork_server.ENVIRONMENT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


async def _start(server: fork_server.ForkServer, end: socket.socket) -> Any:
    if server._module != _MODULE or server._service or os.geteuid():
        return await _execute(server, end)
    asking = _forking(os.getpid())
    socket.send_fds(asking, [json.dumps(server._arguments).encode()], [end.fileno()])
    pid = int(asking.recv(_MESSAGE_BYTES))
    return _Launched(pid, os.pidfd_open(pid))


def preload() -> None:
    """Have the drivers of this process start their launchers so."""
    if os.uname().machine == "x86_64":
        fork_server.ForkServer._start_process = _start  # type: ignore[method-assign, assignment]


def main() -> None:
    """Fork launchers until the tests' process has ended."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    asking.set_inheritable(False)
    # Keeps the interpreter's lock in the child, where no other thread could give it up.
    clone = ctypes.PyDLL(None).syscall
    gc.collect()
    gc.freeze()
    while True:
        request, fds, _, _ = socket.recv_fds(asking, _MESSAGE_BYTES, 1)
        if not request:
            return
        pid = clone(*map(ctypes.c_long, (_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)))
        if pid == 0:
            asking.close()
            os.setsid()
            sys.argv[1:] = [str(fds[0]), *json.loads(request)]
            launcher.main()
            os._exit(0)
        os.close(fds[0])
        asking.send(str(pid).encode())
