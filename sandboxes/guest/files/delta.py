"""The directories that a sandbox's files are compared in, and how much is in them."""

import contextlib
import os
from typing import NamedTuple

from sandboxes.linux import trees

ENTRY_BYTES = 4_096
"""What an entry counts at least, in bytes. An empty file takes no block, but an inode and a name, and a disk has a
fixed number of inodes. With this, limits and budgets of bytes bound the number of files as well: 262,144 for 1 GiB."""


class DeltaRoots(NamedTuple):
    """Descriptors of the directories that are compared."""

    upper: int  # What the sandbox has written since its last layer.
    lower: int  # What lies below it.
    root: int  # The root state.


def bytes_on_disk(status: os.stat_result) -> int:
    """Return the bytes that an entry counts for: those of its blocks, and `ENTRY_BYTES` at least."""
    return max(status.st_blocks * 512, ENTRY_BYTES)


def size_bytes(upper: int, most: int | None = None) -> int:
    """Return the bytes on disk of an upper layer, each entry `ENTRY_BYTES` at least. Counting stops above `most`."""
    total = 0
    for folder in trees.folders(upper):
        for entry in folder.entries:
            # A process of the sandbox may delete the entry at this moment.
            with contextlib.suppress(FileNotFoundError):
                total += bytes_on_disk(entry.stat(follow_symlinks=False))
        # Once for each directory: a caller that only compares with a limit need not walk the rest.
        if most is not None and total > most:
            break
    return total
