"""What an overlay of directories shows, looked up without a mount. The directories are a stranger's or an agent's."""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from sandboxes.guest.users import lines_in
from sandboxes.inspection import GONE, FileEntry, FileKind, FrozenPath
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_copy import is_opaque, is_whiteout

_MAX_LINKS = 40
"""Limits the links that one path leads through, as the kernel does (path_resolution(7))."""
_NO_LINKS = kernel.open_how(os.O_PATH | os.O_NOFOLLOW, kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_BENEATH)
"""No path in a base leads out of it."""
_FOLDER = kernel.open_how(
    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_BENEATH
)
MAX_ENTRIES = 10_000
"""The most entries of a directory that are listed: some 100 ms, and a megabyte of JSON."""


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


def open_path(lowers: Sequence[str], name: str) -> FrozenPath:
    """Return what is at a relative path; see `ReadableStates.open_frozen`. Blocking."""
    try:
        found = _open(lowers, name)
    # No file can have such a name.
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        found = None
    if found is None:
        return FrozenPath(GONE)
    with Opened(found):
        entry = _entry(found)
        if entry.kind == "directory":
            entries, truncated = _merged(lowers, name)
            return FrozenPath(entry, entries=entries, truncated=truncated)
        if entry.kind != "file":
            return FrozenPath(entry)
        # Regular, so this waits for nothing and runs no driver of a device. The descriptor's file is the one looked at.
        return FrozenPath(entry, open(f"/proc/self/fd/{found}", "rb", buffering=0))  # noqa: PTH123


def _merged(lowers: Sequence[str], name: str) -> tuple[dict[str, FileEntry], bool]:
    seen: dict[str, FileEntry] = {}
    for lower in lowers:
        with Opened(os.open(lower, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
            try:
                folder = kernel.openat2(top, os.fsencode(name) or b".", _FOLDER)
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                    raise
                folder = -1
                is_last = error.errno != errno.ENOENT or _hides(top, name)
            if folder >= 0:
                with Opened(folder), os.scandir(folder) as entries:
                    for each in entries:
                        if len(seen) > MAX_ENTRIES:
                            break
                        if each.name not in seen:
                            seen[each.name] = _entry_in(folder, each.name)
                is_last = _hides(top, name)
        if is_last:
            break
    shown = {each: entry for each, entry in sorted(seen.items()) if entry.kind != "gone"}
    return shown, len(seen) > MAX_ENTRIES


def _entry_in(folder: int, name: str) -> FileEntry:
    with Opened(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as found:
        return _entry(found)


def _entry(found: int) -> FileEntry:
    status = os.fstat(found)
    if is_whiteout(status):
        return GONE
    kinds: dict[int, FileKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    return FileEntry(
        kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_size if kind == "file" else 0,
        os.readlink("", dir_fd=found) if kind == "symlink" else None,
    )  # fmt: skip


def _hides(top: int, name: str) -> bool:
    """Return whether a directory on the way to a path, or at it, hides what lower directories have there."""
    parts = name.split("/") if name else []
    for length in range(len(parts), -1, -1):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            way = os.fsencode("/".join(parts[:length])) or b"."
            with Opened(kernel.openat2(top, way, _FOLDER)) as folder:
                if is_opaque(folder):
                    return True
    return False


def _link_at(lowers: Sequence[str], name: str) -> str | None:
    found = _open(lowers, name)
    if found is None:
        return None
    with Opened(found):
        # An empty name is the descriptor's own file (readlinkat(2)).
        return os.readlink("", dir_fd=found) if stat.S_ISLNK(os.fstat(found).st_mode) else None


def _open(lowers: Sequence[str], name: str) -> int | None:
    for lower in lowers:
        with Opened(os.open(lower, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
            try:
                found = kernel.openat2(top, os.fsencode(name) or b".", _NO_LINKS)
            except FileNotFoundError:
                if _hides(top, name):
                    return None
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
