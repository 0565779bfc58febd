"""Terminals whose contents and settings a checkpoint would change, for the processes that run on too."""

# Theory of operation.
#
# CRIU reads what waits in a terminal, and writes it back. It puts whole lines behind the one that is being typed, and a
# restore lacks that one; with echo, what was typed shows once more; where no output fits, some of it is lost. It opens
# the slave end of each master again, so that a master whose slave end has been closed never says so again.

import fcntl
import os
import select
import termios
from typing import Any

from sandboxes.guest.checkpoints.looking import NotDumpableError, events, taken
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, counted, unread_bytes

_TIOCSTI = 0x5412
"""Puts a byte into the input of a terminal (tty_ioctl(4))."""
_FULL = 4095
"""The most bytes that an end of a terminal shows. If more wait there, a dump loses some (measured with Linux 6.18)."""
_TIOCGEXCL = 0x80045440
"""Returns whether only its holders may use a terminal."""


def require_quiet_terminal(path: str, subject: str) -> None:
    """Raise if input of a terminal waits that a checkpoint would change, or if its output is stopped."""
    with Opened(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        if not events(fd) & select.POLLOUT:
            raise NotDumpableError(f"the output of the terminal {subject} is stopped or full")
        if counted(fd, _TIOCGEXCL):
            raise NotDumpableError(f"the terminal {subject} is for its holders only, and a checkpoint loses that")
        settings, waiting = termios.tcgetattr(fd), unread_bytes(fd)
        if waiting >= _FULL:
            raise NotDumpableError(f"more input waits at the terminal {subject} than a restore surely brings back")
        reason = f"input waits at the terminal {subject}, and a checkpoint does not hold it"
        if waiting and settings[3] & (termios.ICANON | termios.ECHO):
            raise NotDumpableError(reason)
        if settings[3] & termios.ICANON and _is_being_typed(fd, settings, reason):
            raise NotDumpableError(reason)


def require_quiet_master(pid: int, number: int) -> None:
    """Raise if the other end of a terminal's master end has been closed, or if much of its output waits."""
    with taken(pid, number) as fd:
        if events(fd) & select.POLLHUP:
            raise NotDumpableError(f"process {pid} holds a terminal whose other end is closed, and a restore opens it")
        if unread_bytes(fd) >= _FULL:
            raise NotDumpableError(
                f"more output waits at a terminal of process {pid} than a restore surely brings back"
            )


def _is_being_typed(fd: int, settings: list[Any], reason: str) -> bool:
    """Return whether part of a line waits. It shows only without lines."""
    if not kernel.holds(kernel.CAP_SYS_ADMIN):
        raise NotDumpableError(reason)
    typed = b""
    termios.tcsetattr(fd, termios.TCSANOW, _with_local(settings, off=termios.ICANON | termios.ECHO))
    try:
        if count := unread_bytes(fd):
            typed = os.read(fd, count)
    finally:
        quiet = termios.ECHO | termios.ISIG | termios.IEXTEN
        termios.tcsetattr(fd, termios.TCSANOW, _with_local(settings, off=quiet))
        for byte in typed:
            fcntl.ioctl(fd, _TIOCSTI, bytes([byte]))
        termios.tcsetattr(fd, termios.TCSANOW, settings)
    return bool(typed)


def _with_local(settings: list[Any], *, off: int) -> list[Any]:
    *others, local, read_bits, write_bits, characters = settings
    return [*others, local & ~off, read_bits, write_bits, characters]
