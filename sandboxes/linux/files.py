"""Removal of directory trees of the agent's making, of any depth and with any names; and files that reach the disk."""

# Theory of operation.
#
# One directory is open at a time. The way back up is `..`, and each level is compared with what it was on the way
# down: if a process moved a directory meanwhile, the removal stops, because `..` could lead out of the tree.

import contextlib
import errno
import hashlib
import os
import stat
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sandboxes.linux.descriptors import Opened, write_out

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1_000
"""How many directories of one level are kept in memory while they are removed."""


class _Level(NamedTuple):
    """A directory on the way down; `waiting` and `stuck` are names in it, to be removed and not removable."""

    name: str
    identity: tuple[int, int]
    waiting: list[str]
    stuck: set[str]


def remove_tree(path: Path) -> bool:
    """Delete a directory and everything in it, even if modes forbid it; return whether nothing is left."""
    try:
        parent = os.open(path.parent, _FOLDER & ~os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        remove_entry(path.name, parent, force=True)
    except OSError:
        # Another thread may be removing a part of the tree: what counts is whether it is gone.
        return not os.path.lexists(path)
    finally:
        os.close(parent)
    return True


def file_digest(path: Path) -> str:
    """Return a digest of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def sync_path(path: str | Path, *, within: int | None = None) -> None:
    """Wait until a file, or the names in a directory, are on the disk (fsync(2): a file's own name is not synced).

    With `within`, a directory of the agent's making, a link at the path's end is an error; else it is followed.
    """
    links = 0 if within is None else os.O_NOFOLLOW
    with Opened(os.open(path, os.O_RDONLY | links | os.O_CLOEXEC, dir_fd=within)) as descriptor:
        os.fsync(descriptor)


def write_file(path: str, content: bytes, *, new: bool = False) -> None:
    """Write a file of the proxy's own, which must not exist if `new`; faster than a Python file object."""
    mode = os.O_EXCL if new else os.O_TRUNC
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | mode | os.O_CLOEXEC, 0o666)
    try:
        write_out(fd, content)
    finally:
        os.close(fd)


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Replace a file of the proxy's own, for its owner only. A kill leaves the old content or the new."""
    # Overwrites what a kill may have left of an earlier draft.
    draft = path.with_name(f"{path.name}.part")
    # The mode first: the content may be a secret.
    draft.touch(mode=0o600)
    draft.write_bytes(content)
    if sync:
        sync_path(draft)
    # Atomic: a reader sees no half-written file.
    draft.rename(path)
    if sync:
        sync_path(path.parent)


def boot_id() -> str:
    """Return the kernel's name of this start of the machine (random(4)); the same text where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def remove_path(path: str) -> None:
    """Delete what is at a path, as `remove_entry` does."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if name in {"", ".", ".."}:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    with Opened(os.open(folder or ("/" if path.startswith("/") else "."), _FOLDER & ~os.O_NOFOLLOW)) as parent:
        remove_entry(name, parent)


def remove_entry(name: str, folder: int, *, force: bool = False) -> None:
    """Delete a file, or a directory with everything in it; a missing one is no error. `force` changes modes."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return
    except FileNotFoundError:
        return
    removal = _Removal(folder, force=force)
    try:
        removal.run(name)
    finally:
        os.close(removal.here)
    if removal.error is not None:
        raise removal.error


class _Removal:
    """One removal; `here` is the directory that is open, and `error` the first failure."""

    def __init__(self, folder: int, *, force: bool) -> None:
        self.here, self._force = os.dup(folder), force
        self.error: OSError | None = None

    def run(self, name: str) -> None:
        levels = [_Level("", _identity(self.here), [name], set())]
        while levels:
            level = levels[-1]
            if not level.waiting and len(levels) > 1:
                # New entries may have come, and a level's names come in pieces.
                level.waiting.extend(self._clear(level.stuck))
            if level.waiting:
                if (below := self._enter(level, level.waiting.pop())) is not None:
                    levels.append(below)
                continue
            levels.pop()
            if levels and not self._leave(level, levels[-1]):
                return

    def _clear(self, stuck: set[str]) -> list[str]:
        # A dictionary keeps the order, so that a removal always takes the same way.
        below: dict[str, None] = {}
        while len(below) < _PIECE:
            with os.scandir(self.here) as entries:
                names = [entry.name for entry in islice(entries, len(stuck) + len(below) + _PIECE)]
            fresh = [name for name in names if name not in stuck and name not in below]
            if not fresh:
                break
            for name in fresh:
                try:
                    os.unlink(name, dir_fd=self.here)
                except IsADirectoryError:
                    below[name] = None
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._stay(name, stuck, error)
        return list(below)

    def _enter(self, level: _Level, name: str) -> _Level | None:
        try:
            os.rmdir(name, dir_fd=self.here)
        except FileNotFoundError:
            return None
        except OSError:
            # It has entries. Any other reason will be the same on the way back up.
            try:
                inner = self._open(name)
            except OSError as error:
                self._stay(name, level.stuck, error)
                return None
        else:
            return None
        os.close(self.here)
        self.here = inner
        return _Level(name, _identity(inner), [], set())

    def _open(self, name: str) -> int:
        if self._force and os.geteuid():
            # Without rights over all files, a directory's own mode may forbid to open it or to remove what is in it.
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            with Opened(os.open(name, flags, dir_fd=self.here)) as fd, contextlib.suppress(OSError):
                os.chmod(f"/proc/self/fd/{fd}", 0o700)  # noqa: PTH101
        return os.open(name, _FOLDER, dir_fd=self.here)

    def _leave(self, level: _Level, above: _Level) -> bool:
        """Go back up and remove the directory that was left; return False if it has been moved meanwhile."""
        parent = os.open("..", _FOLDER, dir_fd=self.here)
        os.close(self.here)
        self.here = parent
        if _identity(parent) != above.identity:
            self.error = self.error or OSError(f"directory {level.name!r} was moved while it was removed")
            return False
        try:
            os.rmdir(level.name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._stay(level.name, above.stuck, error)
        return True

    def _stay(self, name: str, stuck: set[str], error: OSError) -> None:
        # Remembered, so that the next look at this level does not try the name again.
        stuck.add(name)
        self.error = self.error or error


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
