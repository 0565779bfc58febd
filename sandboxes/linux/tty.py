"""Sizes of terminal windows."""

import fcntl
import struct
import termios


def set_size(fd: int, columns: int, rows: int) -> None:
    """Set the size of a terminal's window. The kernel sends SIGWINCH to the processes in it."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
