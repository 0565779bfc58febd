"""Frozen states of containers on disk: one directory each, and never one that another one needs.

    states/<id>/diff meta.json      a copy of what a container had written over its image; read-only from then on
Files that did not change from one state to the next are hard links, so a state costs what it added; deleting one frees
what no other shares. Renamed into place when whole: a name without `meta.json` does not exist.
"""

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandboxes.linux.files import remove_tree


class States:
    """The states of one data directory. Methods block: milliseconds a thousand files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: Counter[str] = Counter()
        self._inodes: dict[str, dict[int, int]] = {}

    def open(self) -> None:
        """Make the directory, and remove what is half written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for path in self.folder.iterdir():
            if not (path / "meta.json").exists() or path.suffix == ".part":
                remove_tree(path)

    def allocate(self) -> tuple[str, Path]:
        """Return a new name, and where to write that state before `keep`."""
        name = secrets.token_hex(8)
        return name, self.folder / f"{name}.part"

    def keep(self, name: str) -> None:
        (self.folder / f"{name}.part").rename(self.folder / name)

    def there(self, name: str) -> bool:
        return (self.folder / name / "meta.json").exists()

    def all(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.suffix != ".part"}

    def added_bytes(self, name: str) -> int:
        return int(json.loads((self.folder / name / "meta.json").read_bytes())["added_bytes"])

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """Keep a state from being collected while it is laid over a container."""
        self.held[name] += 1
        try:
            yield
        finally:
            self.held[name] -= 1
            self.held += Counter()

    def drop(self, names: Iterable[str]) -> None:
        """Delete states."""
        for name in names:
            # First the name: a half-deleted state must not look like one.
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name / "meta.json").unlink()
            remove_tree(self.folder / name)
            self._inodes.pop(name, None)

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return what states occupy together; what they share counts once."""
        shared: dict[int, int] = {}
        for name in names:
            if name not in self._inodes:
                self._inodes[name] = dict(_inodes(self.folder / name / "diff"))
            shared |= self._inodes[name]
        return sum(shared.values())


def _inodes(folder: Path) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            yield status.st_ino, status.st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                yield from _inodes(Path(entry.path))
