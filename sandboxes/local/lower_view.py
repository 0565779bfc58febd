"""What an overlay of a base's directories shows, looked up without a mount. The directories are a stranger's."""

import errno
import os
import stat
from collections.abc import Sequence

from sandboxes.guest.users import lines_in
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_copy import is_whiteout

_MAX_LINKS = 40
"""Limits the links that one path leads through, as the kernel does (path_resolution(7))."""
_NO_LINKS = kernel.open_how(os.O_PATH | os.O_NOFOLLOW, kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_BENEATH)
"""No path in a base leads out of it."""


def status_of(lowers: Sequence[str], name: str) -> os.stat_result | None:
    """Return what a base has at a relative path; None if there is nothing, or a link or file on the way."""
    found = _open(lowers, name)
    if found is None:
        return None
    with Opened(found):
        return os.fstat(found)


def lines_of(lowers: Sequence[str], name: str) -> list[str]:
    """Return the lines of a small file, as `users.lines_in` reads them; none if a base has no file there."""
    found = _open(lowers, name)
    if found is None:
        return []
    with Opened(found):
        # Looked at before it is opened: a link cannot be, and a device must not be.
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return []
        with Opened(os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)) as file:
            return lines_in(file)


def has_file(lowers: Sequence[str], name: str) -> bool:
    """Return whether a path is a file, with links resolved as a process with this root resolves them."""
    parts, here = name.split("/"), list[str]()
    for _ in range(_MAX_LINKS * len(parts)):
        if not parts:
            status = status_of(lowers, "/".join(here))
            return status is not None and stat.S_ISREG(status.st_mode)
        part = parts.pop(0)
        if part in {"", "."}:
            continue
        if part == "..":
            # The parent of the root is the root itself.
            here = here[:-1]
            continue
        link = _link_at(lowers, "/".join([*here, part]))
        if link is None:
            here.append(part)
            continue
        parts = [*link.split("/"), *parts]
        # An absolute link begins at the base's root, not at the machine's: the machine's files must not count.
        here = [] if link.startswith("/") else here
    return False


def _link_at(lowers: Sequence[str], name: str) -> str | None:
    found = _open(lowers, name)
    if found is None:
        return None
    with Opened(found):
        # An empty name is the descriptor's own file (readlinkat(2)).
        return os.readlink("", dir_fd=found) if stat.S_ISLNK(os.fstat(found).st_mode) else None


def _open(lowers: Sequence[str], name: str) -> int | None:
    """Return a descriptor of what is at a path in the topmost directory that has it."""
    for lower in lowers:
        with Opened(os.open(lower, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
            try:
                found = kernel.openat2(top, os.fsencode(name) or b".", _NO_LINKS)
            except FileNotFoundError:
                continue
            except OSError as error:
                # A link or a file on the way hides what lower directories have there.
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    return None
                raise
        if is_whiteout(os.fstat(found)):
            os.close(found)
            return None
        return found
    return None
