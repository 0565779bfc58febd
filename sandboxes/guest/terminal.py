"""A terminal in a sandbox, opened by pid 1; `pty` is the driver's side of it."""

import fcntl
import os
import socket
import termios
from collections.abc import Callable

from sandboxes.guest import bash_session as sessions
from sandboxes.guest.anchor import BASH, ShellStartError
from sandboxes.ipc.frames import pack
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.tty import set_size
from sandboxes.session_types import ShellSession

INTERACTIVE = b"""
shopt -s expand_aliases; set -mH; export TERM=xterm-256color; unset PROMPT_COMMAND; PS1='\\w\\$ '
"""


def give(driver: socket.socket, start: Callable[[], int]) -> None:
    """Start a shell on a terminal, and give the driver our end; or tell it why there is none."""
    try:
        end = start()
    except (OSError, ShellStartError) as error:
        driver.sendall(pack({"failed": f"no terminal can be had: {error}"}))
        return
    socket.send_fds(driver, [pack({}, fds=1)], [end])
    os.close(end)


def start_shell(session: ShellSession | None, environment: dict[str, str], workdir: str, size: tuple[int, int]) -> int:
    """In pid 1: start a bash on a new terminal, as session; return our end.

    It is started outside the anchor's tree: no checkpoint is taken of a sandbox that somebody types in.

    Raises:
        OSError: no terminal, or no process, can be had.
    """
    master, slave = os.openpty()
    try:
        set_size(slave, *size)
        if os.fork() == 0:
            _become_shell(slave, session, environment, workdir)
    except OSError:
        os.close(master)
        raise
    finally:
        os.close(slave)
    return master


def _become_shell(slave: int, session: ShellSession | None, environment: dict[str, str], workdir: str) -> None:
    try:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        script = os.memfd_create("text", os.MFD_CLOEXEC)
        os.pwrite(script, sessions.restore_script(session, workdir) + INTERACTIVE, 0)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        places = {0: slave, 1: slave, 2: slave, sessions.RESTORE_FD: script, sessions.DUMP_FD: null}
        kernel.arrange_descriptors(places)
        kernel.reset_signals()
        told = environment if session is None else {}
        argv = ["bash", "--noprofile", "--rcfile", f"/proc/self/fd/{sessions.RESTORE_FD}", "-i"]
        os.execve(BASH, argv, {"PATH": os.defpath, **told})  # noqa: S606
    finally:
        os._exit(127)
