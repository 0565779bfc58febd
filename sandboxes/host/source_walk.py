"""The digest of a directory, made in a process of its own: 100,000 entries take seconds in which hits must not wait.

It runs as `python -I -S -c "..." ROOT INOTIFY` with ROOT a path below `/proc/self/fd` that the parent has opened, and
INOTIFY a descriptor of the parent's, or -1. Each directory is watched *before* it is listed. So a change is either in
the digest or among the events that the parent reads; none falls in between. Standard library only.
"""

import errno
import hashlib
import os
import sys
from collections.abc import Callable

from sandboxes.linux import syscalls as kernel

MODIFY, _ATTRIB, _MOVED, _CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x2, 0x4, 0xC0, 0x100, 0x200, 0x400, 0x800
CHANGES = MODIFY | _ATTRIB | _MOVED | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
"""Events of inotify(7) that may change a digest of a directory's entries. Reading causes none of them."""
_OUT_OF_WATCHES = {errno.ENOSPC, errno.ENOMEM}
_ATTEMPTS = 3
"""How often a directory that changes while it is walked is walked again."""


def directory_digest(root: str, watch: Callable[[str], None] = lambda _folder: None) -> str:
    """Digest path, size, mtime, mode and owner of all entries; `watch` gets each directory before its listing."""
    digest = hashlib.blake2b(digest_size=16)
    # Directories in the order of their names, each after its own entries, whatever order the file system has.
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        watch(folder)
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        # Unreadable directories count by what their parents say of them, as the sandbox cannot read them either.
        except PermissionError:
            continue
        for entry in entries:
            # No link is followed: a link is content itself, and what it leads to may be outside.
            status = entry.stat(follow_symlinks=False)
            facts = (entry.path[len(root) + 1 :], status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid)
            # Names are bytes to the kernel; `surrogateescape` gives back those that are no UTF-8.
            digest.update(repr(facts).encode(errors="surrogateescape"))
        waiting.extend(entry.path for entry in reversed(entries) if entry.is_dir(follow_symlinks=False))
    return digest.hexdigest()


def main() -> None:
    """Print the digest, and whether all directories are watched."""
    root, inotify = sys.argv[1], int(sys.argv[2])
    # Hits and calls come first.
    os.nice(5)
    is_watched = inotify >= 0

    def watch(folder: str) -> None:
        nonlocal is_watched
        try:
            if is_watched:
                kernel.inotify_add(inotify, folder, CHANGES)
        except OSError as error:
            if error.errno not in _OUT_OF_WATCHES:
                raise
            # Half a watch says nothing, so the kernel's memory for it is given back by the parent.
            is_watched = False

    for left in reversed(range(_ATTEMPTS)):
        try:
            digest = directory_digest(root, watch)
        except FileNotFoundError:
            if not left:
                raise
        else:
            print(digest, int(is_watched))
            return
