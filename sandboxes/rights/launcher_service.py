"""A launcher that is root, for a proxy that is not: `forkpoint launcher` starts one for each that asks at a socket.

Only one user may ask, as the kernel identifies it (unix(7), SO_PEERCRED), and `grounds` bounds what the launcher does.
The proxy's end is `ipc.launched_process`.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import NoReturn

from sandboxes.ipc.fork_server import ENVIRONMENT, command_of
from sandboxes.ipc.frames import receive
from sandboxes.linux import cgroups, confine, oom_score
from sandboxes.linux import syscalls as kernel
from sandboxes.rights import held
from sandboxes.rights.grounds import FOR

MODULE = "sandboxes.local.launcher"
_CREDENTIALS = struct.Struct("3i")
"""A `struct ucred` (unix(7)): process, user, group."""
_PATIENCE_S = 5.0
"""How long one that is connected may take to ask, while others wait."""
_MOST_ARGUMENTS_BYTES = 1 << 14
_RLIMIT_NICE, _NICENESS = 13, 30
"""The limit of niceness (asm-generic/resource.h): 20 less the lowest one, which the proxy gives its session."""


def listen(path: Path, uid: int) -> socket.socket:
    """Return a socket at a path that is made anew, to which a user may connect."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Before it has a name: nobody else may ever connect.
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    os.chown(path, uid, -1)
    listening.listen()
    return listening


def make_directory(folder: Path, uid: int, gid: int) -> None:
    """Make the data directory of a user's proxy, or give it to the user. What is in it keeps its owners."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(folder, uid, gid)


def serve(listening: socket.socket, uid: int, folder: str) -> NoReturn:
    """Start launchers for the proxies of a user, whose directories lie below a folder."""
    # The kernel reaps launchers; their proxies watch them by process descriptors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        with listening.accept()[0] as client, contextlib.suppress(OSError, ValueError):
            client.settimeout(_PATIENCE_S)
            _answer(client, uid, folder)


def _answer(client: socket.socket, uid: int, folder: str) -> None:
    if _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1] != uid:
        return
    request, fds = receive(client, _MOST_ARGUMENTS_BYTES)
    try:
        (host_view,) = json.loads(request)
        (end,) = fds
        command = command_of(MODULE, end, [str(host_view), FOR, str(uid), folder])
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            command, start_new_session=True, pass_fds=[end], env=dict(ENVIRONMENT), cwd="/", stdin=subprocess.DEVNULL
        )
    finally:
        for fd in fds:
            os.close(fd)
    started = os.pidfd_open(process.pid)
    try:
        socket.send_fds(client, [str(process.pid).encode()], [started])
    finally:
        os.close(started)
        # Its end is nobody's here: nothing waits for it.
        process.returncode = 0


def run_beside(program: list[str], uid: int, gid: int, listening: socket.socket, folder: str) -> NoReturn:
    """Serve in a child of this process, which becomes a program of a user with the rights that a proxy needs."""
    # So a container's first process is the proxy: it gets the signals, and its exit code is the container's.

    # What a unit gives its proxy, and what the proxy could not give itself afterwards.
    cgroups.make_writable()
    if os.fork() == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(listening, uid, folder)
    oom_score.shelter()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(_RLIMIT_NICE, (_NICENESS, _NICENESS))
    os.environ |= {held.LAUNCHER: str(listening.getsockname()), "FORKPOINT_DATA": folder}
    listening.close()
    confine.become_user_with(tuple(held.NEEDED.values()), uid, gid)
    os.execvp(program[0], program)  # noqa: S606 - what the command line names


def tell_ready() -> None:
    """Tell systemd that proxies can connect (sd_notify(3)), if it has started this process."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            manager.send(b"READY=1")


def require_root() -> None:
    """Raise `PermissionError` if this process cannot make sandboxes with the machine's root."""
    if os.geteuid() != 0 or not kernel.holds(kernel.CAP_SYS_ADMIN):
        raise PermissionError("the launcher needs root, and the capabilities that docs/deploying.md lists")
