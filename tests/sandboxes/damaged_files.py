"""Damage that only a look at a file's content shows."""

import os
from pathlib import Path


def flip(path: Path) -> None:
    """Change a bit in the middle of a file that is not empty, and put its times back."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
