"""Whether a sandbox still has a shell that a program could execute: without one, nearly every command fails."""

import os
import stat
import struct

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened

_SHELLS = (b"bin/sh", b"bin/bash")
_PLACE = kernel.open_how(os.O_PATH, kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS)
# O_NONBLOCK: in place of the shell an agent may have made a FIFO, and the open must not wait for its writer.
_FILE = kernel.open_how(os.O_RDONLY | os.O_NONBLOCK, kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS)
_INTERPRETER = 3
"""The type of the program header that names a program's loader (elf(5), PT_INTERP)."""
_HEADERS_BYTES = 1 << 13
"""How much of a program is read. The headers and the loader's name are at its beginning, as linkers write it."""


def is_broken(root: int, now: int) -> bool:
    """Return whether no shell can be executed below the directory `now`, although one could below `root`."""
    return not _has_shell(now) and _has_shell(root)


def _has_shell(folder: int) -> bool:
    return any(_is_executable(folder, name) for name in _SHELLS)


def _is_executable(folder: int, name: bytes) -> bool:
    """Return whether a file has a right to be executed, and the loader that it names is there too."""
    try:
        with Opened(kernel.openat2(folder, name, _PLACE)) as place:
            mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode) or not mode & 0o111:
            return False
        with Opened(kernel.openat2(folder, name, _FILE)) as file:
            loader = _loader(os.pread(file, _HEADERS_BYTES, 0))
        if loader:
            os.close(kernel.openat2(folder, loader, _PLACE))
    except OSError:
        return False
    return True


def _loader(data: bytes) -> bytes:
    """Return the path of the loader that a 64-bit program names; empty if it names none, or is another kind of file."""
    if len(data) < 64 or data[:5] != b"\x7fELF\x02":
        return b""
    (at,), (size, count) = struct.unpack_from("=Q", data, 32), struct.unpack_from("=HH", data, 54)
    for header in range(at, at + size * count, size or 1):
        if size < 56 or header + size > len(data):
            return b""
        kind, _, offset = struct.unpack_from("=IIQ", data, header)
        if kind == _INTERPRETER:
            return data[offset : offset + 4096].partition(b"\0")[0]
    return b""
