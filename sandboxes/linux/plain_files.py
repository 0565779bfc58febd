"""Paths that stay the file or directory that they were when they were checked."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sandboxes.linux.descriptors import Opened
from sandboxes.linux.plain_paths import plain_descriptor


@contextlib.contextmanager
def open_plain(path: str | Path) -> Iterator[Path]:
    """Open a path without links, see `plain_descriptor`, and yield another path that stays the opened file.

    Yields:
        A path below `/proc/self/fd`, valid in this process until the block ends. A child that inherits the descriptor
        can use it too.

    Raises:
        OSError: The path does not exist, has a link in it, or is neither a directory nor a regular file.
    """
    with Opened(plain_descriptor(str(path))) as fd:
        yield Path(f"/proc/self/fd/{fd}")
