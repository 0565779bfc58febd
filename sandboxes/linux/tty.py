"""Terminal window sizes."""

import fcntl
import struct
import termios


def set_size(fd: int, columns: int, rows: int) -> None:
    """Say how large a terminal's window is; what runs in it is told."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
