"""File descriptors as plain numbers: opening and closing, writing all of something, reading what is there."""

import fcntl
import functools
import os
import struct
import termios
from collections.abc import Iterable

_CHUNK = 1 << 16
"""Bytes that one read takes at the most: the size of a pipe (pipe(7))."""


class Opened:
    """A descriptor that the `with` block closes at its end, without a generator."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def open_unnoticed(name: str | bytes, flags: int, *, within: int | None = None) -> int:
    """Open what a sandbox's programs see, so that reading it leaves its access time as it is (O_NOATIME).

    Without rights over all files the time changes, at most once a day after each change of the file (mount(8),
    `relatime`).
    """
    try:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOATIME, dir_fd=within)
    except PermissionError:
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=within)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def write_out(fd: int, data: bytes) -> None:
    """Write all data to a blocking descriptor, however little a single write(2) takes."""
    # A view, because slices of bytes would copy the rest after each write.
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def overwrite(fd: int, data: bytes) -> None:
    """Make bytes the whole content of a file, wherever the descriptor stands."""
    view, written = memoryview(data), 0
    # pwrite may take less than it was given (write(2)).
    while written < len(data):
        written += os.pwrite(fd, view[written:], written)
    # Truncated last: if a file was truncated to 0, ext4 writes it to the disk when it is closed (ext4(5),
    # auto_da_alloc). Its removal then takes 2 ms, not 0.03.
    os.ftruncate(fd, len(data))


def read_available(fd: int) -> bytes | None:
    """Read from a non-blocking descriptor, at most 64 KiB: empty at the file's end; None if nothing is there."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def counted(fd: int, request: int) -> int:
    """Return the number that an ioctl answers with."""
    return int(struct.unpack("i", fcntl.ioctl(fd, request, bytes(4)))[0])


def unread_bytes(fd: int) -> int:
    """Return how many bytes are in a pipe, or can be read of a terminal or a queue."""
    return counted(fd, termios.FIONREAD)


def output_pipe() -> tuple[int, int]:
    """Return our end of a pipe, which does not block, and the end for a process of the sandbox that prints to it."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    # A process that becomes another user may open /dev/stdout, which is this pipe, again.
    os.fchmod(theirs, 0o666)
    return ours, theirs


@functools.cache
def memory_device() -> int:
    """Return the device of all shared memory, which no agent can mount."""
    with Opened(os.memfd_create("device", os.MFD_CLOEXEC)) as fd:
        return os.fstat(fd).st_dev


def set_size(fd: int, columns: int, rows: int) -> None:
    """Set the size of a terminal's window. The kernel sends SIGWINCH to the processes in it."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
