"""Copies of a container's upper directory, which holds what differs from the image.

`Copy.take` writes a copy at a freeze; `lay_over` puts it over a fresh container at a restore. A copy holds what
`docker commit` would keep: content, modes, owners, extended attributes and whiteouts. It also keeps times and hard
links. Rules 1 and 4 stand at the lines that keep them; `linux.file_copy` keeps the others.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping

from sandboxes.guest.files.delta import ENTRY_BYTES
from sandboxes.linux import trees
from sandboxes.linux.file_copy import copy_entry, copy_facts, is_opaque, is_whiteout
from sandboxes.linux.file_flags import copy_flags
from sandboxes.linux.files import remove_entry

OPAQUE = "trusted.overlay.opaque"
"""The attribute of a directory that hides everything below it in the image."""

MARKS = "trusted.overlay."
"""The prefix of all attributes that overlayfs uses for itself."""

MOUNTED = frozenset(["proc", "dev", "sys"])
"""Top-level directories over which a container has mounts: nothing below them belongs to its files."""

Links = dict[str, str]
"""Paths of further hard links, each with the path under which the copy has the file."""


class Copy:
    """Copies an upper directory into an empty one.

    Attributes:
        links: The hard links in the original, known after `take`.
        added_bytes: The bytes on disk of files that no earlier copy has, known after `take`.
    """

    def __init__(self, earlier: Callable[[str], str | None]) -> None:
        """Start with nothing copied.

        Args:
            earlier: Returns the path of an unchanged file in an earlier copy; None if there is none.
        """
        self.links: Links = {}
        self.added_bytes = 0
        self._earlier = earlier
        self._seen: dict[int, str] = {}

    def take(self, source: int, target: int) -> None:
        """Copy the directory `source` into `target`, both descriptors; 0.1 ms a file.

        Raises:
            TreeTooDeepError: Directories are nested too deeply.
        """
        folders: list[tuple[str, os.stat_result]] = []
        for folder in trees.folders(source):
            if folder.path.partition("/")[0] in MOUNTED:
                continue
            if folder.path:
                # Private until `copy_facts` sets the mode: the content of a directory with mode 0700 must not be
                # readable for a moment.
                os.mkdir(folder.path, 0o700, dir_fd=target)
            folders.append((folder.path, os.fstat(folder.fd)))
            with _opened(folder.path, target) as copy:
                for name, status in _files(folder):
                    self._entry(folder, name, status, copy)
        # The inner directories first: entries that are made in a directory change its time.
        for path, status in reversed(folders):
            with _opened(path, source) as inner, _opened(path, target) as copy:
                _copy_marks(inner, copy)
                copy_flags(inner, copy)
                copy_facts(".", status, inner, copy, MARKS)

    def _entry(self, folder: trees.Folder, name: str, status: os.stat_result, target: int) -> None:
        path = folder.path + name
        # The first path of an inode holds the file, every further one becomes an entry of `links`. Whiteouts may
        # share one inode too (overlayfs does that), but each is made separately.
        if status.st_nlink > 1 and not is_whiteout(status):
            if status.st_ino in self._seen:
                self.links[path] = self._seen[status.st_ino]
                return
            # Inode numbers suffice as keys, because an upper directory lies on one file system.
            self._seen[status.st_ino] = path
        self._leaf(name, path, status, folder.fd, target)

    def _leaf(self, name: str, path: str, status: os.stat_result, source: int, target: int) -> None:
        # Rule 4: a file that an earlier copy already has is hard-linked to it, so a copy costs what changed since.
        known = self._earlier(path) if stat.S_ISREG(status.st_mode) else None
        if known is not None:
            # Linking fails when the earlier copy was collected meanwhile, or its file has the maximum of links.
            with contextlib.suppress(OSError):
                # A hard link shares all that an inode has: content, mode, owner and times. So it is only right for a
                # file whose signature is unchanged.
                os.link(known, name, dst_dir_fd=target, follow_symlinks=False)
                return
        copy_entry(name, status, source, target, MARKS)
        # st_blocks counts units of 512 bytes, whatever the file system's block size is (stat(2)). Holes take none.
        self.added_bytes += max(status.st_blocks * 512, ENTRY_BYTES)


def lay_over(source: int, target: int, links: Mapping[str, str]) -> None:
    """Bring a container's root to the state in which a copy was taken. No process of the agent may run there yet.

    Args:
        source: A descriptor of the copy.
        target: A descriptor of the container's root.
        links: The copy's hard links.
    """
    _lay(source, target)
    for path, first in links.items():
        # `_lay` has not made this path, but the image may have a file here.
        folder, _, name = path.rpartition("/")
        with _opened(folder, target) as into:
            remove_entry(name, into)
        os.link(first, path, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
        # Linking and unlinking changed the directory's time after it was set.
        folder = folder or "."
        status = os.stat(folder, dir_fd=source, follow_symlinks=False)
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _lay(source: int, target: int) -> None:
    """Lay the directory of a copy over that of a container."""
    folders: list[str] = []
    # Directories that were just made, so that nothing can be in the way of their entries.
    made: set[str] = set()
    for folder in trees.folders(source):
        if folder.path.partition("/")[0] in MOUNTED:
            continue
        folders.append(folder.path)
        if folder.path and _make_folder(folder.path, folder.fd, target):
            made.add(folder.path)
        with _opened(folder.path, target) as into:
            for name, status in _files(folder):
                # A whiteout of the copy removes the name through the container's overlay, which makes a whiteout of its
                # own in the upper directory.
                if folder.path not in made:
                    remove_entry(name, into)
                if not is_whiteout(status):
                    copy_entry(name, status, folder.fd, into, MARKS)
    for path in reversed(folders):
        with _opened(path, source) as inner, _opened(path, target) as into:
            copy_flags(inner, into)
            copy_facts(".", os.fstat(inner), inner, into, MARKS)


def _files(folder: trees.Folder) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the entries of a directory that are no directories and no mounts."""
    for entry in folder.entries:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) and (folder.path or entry.name not in MOUNTED):
            yield entry.name, status


def _make_folder(path: str, source: int, target: int) -> bool:
    """Make a directory of the copy in the container; return whether it is a new one there."""
    folder, _, name = path.rstrip("/").rpartition("/")
    with _opened(folder, target) as above:
        below = _status(name, above)
        # The copy's directory replaces what the image has there if that is no directory, or if it was made opaque.
        # Removing through the overlay and making the directory again makes overlayfs set its own opaque mark.
        if below is not None and (not stat.S_ISDIR(below.st_mode) or is_opaque(source, MARKS)):
            remove_entry(name, above)
            below = None
        if below is None:
            os.mkdir(name, 0o700, dir_fd=above)
        return below is None


def _copy_marks(source: int, target: int) -> None:
    if is_opaque(source, MARKS):
        # Only root of the first user namespace can set `trusted.` attributes (xattr(7)), so no agent can forge the
        # mark.
        os.setxattr(target, OPAQUE, b"y")


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(path: str, top: int) -> Iterator[int]:
    # Rule 1: every directory is opened below a descriptor, without following links. A symlink that an agent made can
    # therefore never lead a copy to files of the host.
    fd = trees.open_below(top, path)
    if fd is None:
        raise FileNotFoundError(f"directory {path!r} is gone")
    try:
        yield fd
    finally:
        os.close(fd)
