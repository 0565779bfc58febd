"""Frozen states of containers on disk: one directory each, none of which needs another.

    states/<id>.part                a copy that a keeper is writing
    states/<id>/diff                a copy of what a container wrote over its image; never changed again
    states/<id>/meta.json           its digest, its hard links, and the bytes that it added; of an imported copy also
                                    the digest of its tar (`portable_copies`)

A file that did not change since the state before is a hard link to that state's copy. So a state costs what it added,
and deleting a state frees what no other one shares. A state exists once its directory is renamed to its name, and as
long as it has `meta.json`.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandboxes.guest.files.delta import ENTRY_BYTES
from sandboxes.linux import trees
from sandboxes.linux.file_flags import spread_below
from sandboxes.linux.files import remove_tree

_log = logging.getLogger(__name__)


class StateCopies:
    """The frozen states of one data directory. Methods block: milliseconds for a thousand files.

    Attributes:
        folder: The directory of all states.
    """

    def __init__(self, folder: Path) -> None:
        """Name the directory; `open` makes it."""
        self.folder = folder
        self._inodes: dict[str, dict[int, int]] = {}

    def open(self) -> None:
        """Make the directory, and remove states that a killed process wrote or deleted halfway."""
        self.folder.mkdir(parents=True, exist_ok=True)
        spread_below(str(self.folder))
        # The copies keep the modes and owners of the container's files, so only this directory keeps other users out.
        self.folder.chmod(0o700)
        for path in self.folder.iterdir():
            # A killed process leaves either form: `.part` while a keeper wrote, a directory without `meta.json` while
            # `drop` deleted.
            unfinished = not (path / "meta.json").exists() or path.suffix == ".part"
            if unfinished and not remove_tree(path):
                _log.warning("%s cannot be removed, and is left as it is", path)

    def allocate(self) -> tuple[str, Path]:
        """Return a new name, and the directory in which the keeper writes that state before `keep`."""
        name = secrets.token_hex(8)
        return name, self.folder / f"{name}.part"

    def keep(self, name: str) -> None:
        """Make a state that is written completely exist under its name."""
        (self.folder / f"{name}.part").rename(self.folder / name)

    def exists(self, name: str) -> bool:
        """Return whether a state exists."""
        return (self.folder / name / "meta.json").exists()

    def all(self) -> set[str]:
        """Return the names of all states."""
        return {path.name for path in self.folder.iterdir() if path.suffix != ".part"}

    def disown(self, names: Iterable[str]) -> None:
        """Make states that will be deleted missing from now on."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name / "meta.json").unlink()

    def drop(self, names: Iterable[str]) -> None:
        """Delete states."""
        for name in names:
            # First: after a crash in between, `open` recognizes the state as deleted halfway.
            self.disown([name])
            remove_tree(self.folder / name)
            self._inodes.pop(name, None)

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes that states occupy together; a file that several states share counts once."""
        shared: dict[int, int] = {}
        for name in names:
            if name not in self._inodes:
                # A state never changes, so it is walked only once. Inode numbers are comparable because all states lie
                # on one file system.
                self._inodes[name] = dict(_inodes(self.folder / name / "diff"))
            shared |= self._inodes[name]
        return sum(shared.values())


def _inodes(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the inode and the bytes on disk of everything below a directory."""
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for below in trees.folders(top):
            for entry in below.entries:
                status = entry.stat(follow_symlinks=False)
                yield status.st_ino, max(status.st_blocks * 512, ENTRY_BYTES)
    finally:
        os.close(top)
