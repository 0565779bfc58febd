"""Directories that are built once, and then used without another look."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from sandboxes.images import tree_check
from sandboxes.linux.files import remove_tree
from sandboxes.linux.syscalls import sync_file_system
from sandboxes.rights import held

_log = logging.getLogger(__name__)


class BuiltTrees:
    """The directories of one folder, which a lock of the caller's keeps for this process. Methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Methods run in threads, and two specs may name the same tree at once. Only one of them builds it.
        self._making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        # Trees that this process has built itself or read completely.
        self._intact: set[str] = set()

    def open(self) -> None:
        """Make the folder, and remove what a killed process left half built."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob("*.part"):
            remove_tree(unfinished)

    def make(self, name: str, build: Callable[[Path], object], *, checked: bool = False) -> Path:
        """Return a directory of the folder; build it completely if it is missing or, if `checked`, was changed."""
        target, digest = self._folder / name, self._folder / f"{name}.digest"
        with self._making[name]:
            # Before its first use in this process: no sandbox has it mounted.
            if checked and not self._look(name) and target.is_dir():
                _log.error("%s is not as it was unpacked, and is unpacked again", target)
                self._remove(target)
            if not target.is_dir():
                part = self._folder / f"{name}.part"
                remove_tree(part)
                part.mkdir()
                held.give_to_root(part)
                try:
                    build(part)
                    if checked:
                        digest.write_text(tree_check.digest_of(part))
                    # A tree is trusted after a loss of power, too: its files must be on the disk before its name is.
                    sync_file_system(str(self._folder))
                    # The rename is atomic (rename(2)), so a tree exists completely or not at all.
                    part.rename(target)
                except BaseException:
                    remove_tree(part)
                    raise
            self._intact.add(name)
        return target

    def is_intact(self, name: str) -> bool:
        """Return whether a directory is there, and is as it was unpacked. It is read once in the life of a process."""
        with self._making[name]:
            return self._look(name)

    def forget(self, name: str) -> None:
        """Remove a directory that nothing uses any more; `OSError` if something of it cannot be removed."""
        with self._making[name]:
            self._intact.discard(name)
            self._remove(self._folder / name)
            (self._folder / f"{name}.digest").unlink(missing_ok=True)

    def _look(self, name: str) -> bool:
        tree, digest = self._folder / name, self._folder / f"{name}.digest"
        if name in self._intact or not tree.is_dir():
            return tree.is_dir()
        # Earlier versions wrote no digest, so that nothing is known.
        if not digest.exists() or digest.read_text() != tree_check.digest_of(tree):
            return False
        self._intact.add(name)
        return True

    def _remove(self, tree: Path) -> None:
        if not remove_tree(tree):
            raise OSError(f"the directory {tree} cannot be removed; remove it by hand")
