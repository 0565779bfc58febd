"""Overlay layers on disk: each sandbox writes to an upper of its own; freezing renames it among the layers.

    uppers/<id>/diff work       what a live sandbox writes; nobody else's, gone with it
    layers/<id>/diff meta.json  frozen, read-only from then on
Layers are named by random ids; a name is never used twice. `meta.json` goes before the rename: a layer without one
does not exist.
"""

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sandboxes.linux.files import remove_tree

DEEP = 24
"""More layers than this above the root state, and small ones are merged: lookups cost 0.5 us a layer and name."""
MERGE_BYTES = 64 << 20
"""Layers above this size are never copied."""


class Upper(NamedTuple):
    """A directory that one live sandbox writes to."""

    id: str
    path: Path


class Layers:
    """The layers of one data directory. Methods do blocking I/O: microseconds unless they say otherwise."""

    def __init__(self, data_dir: Path) -> None:
        self.uppers = data_dir / "uppers"
        self.frozen = data_dir / "layers"
        self.sizes: dict[str, int] = {}

    def open(self) -> None:
        """Make the directories, and remove what dead sandboxes wrote and half-written layers. Seconds at worst."""
        for folder in (self.uppers, self.frozen):
            folder.mkdir(parents=True, exist_ok=True)
        for upper in self.uppers.iterdir():
            remove_tree(upper)
        for layer in self.frozen.iterdir():
            if not (layer / "meta.json").exists():
                remove_tree(layer)

    def allocate(self) -> Upper:
        """Return a fresh, empty upper."""
        upper = Upper(name := secrets.token_hex(8), self.uppers / name)
        upper.path.mkdir()
        for part in ("diff", "work"):
            (upper.path / part).mkdir()
        (upper.path / "diff").chmod(0o755)
        return upper

    def freeze(self, upper: Upper, meta: dict[str, Any]) -> str:
        """Make upper a layer; it stays mounted where it is, and must not be written to any more."""
        (upper.path / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
        upper.path.rename(self.frozen / upper.id)
        self.sizes[upper.id] = int(meta["size_bytes"])
        return upper.id

    def lowers(self, ids: Sequence[str]) -> list[str]:
        return [str(self.frozen / layer / "diff") for layer in ids]

    def missing(self, ids: Sequence[str]) -> list[str]:
        """Return those of ids that are no layer (any more)."""
        return [layer for layer in ids if not (self.frozen / layer / "meta.json").exists()]

    def meta(self, layer: str) -> dict[str, Any]:
        """Return what was written with a layer: delta (None: too large), size_bytes."""
        meta: dict[str, Any] = json.loads((self.frozen / layer / "meta.json").read_bytes())
        return meta

    def size_bytes(self, layer: str) -> int:
        if layer not in self.sizes:
            self.sizes[layer] = int(self.meta(layer)["size_bytes"])
        return self.sizes[layer]

    def all(self) -> set[str]:
        return {path.name for path in self.frozen.iterdir()}

    def disown(self, ids: Iterable[str]) -> None:
        """Take their names from layers that will be deleted: from now on they are missing. 10 us each."""
        for layer in ids:
            with contextlib.suppress(FileNotFoundError):
                (self.frozen / layer / "meta.json").unlink()

    def drop(self, ids: Iterable[str]) -> None:
        """Delete layers; milliseconds per thousand files."""
        for layer in ids:
            # First the name: a half-deleted layer must not look like one.
            self.disown([layer])
            remove_tree(self.frozen / layer)
            self.sizes.pop(layer, None)

    def undo(self, uppers: Iterable[Upper]) -> None:
        """Delete what was to become layers, however far it came."""
        for upper in uppers:
            remove_tree(upper.path)
            self.drop([upper.id])

    def sync(self, ids: Iterable[str]) -> None:
        """Wait until the disk has these layers. 1 ms to minutes, by what they hold."""
        for layer in ids:
            for folder, _, files in os.walk(self.frozen / layer, topdown=False):
                for path in (*(Path(folder) / name for name in files), Path(folder)):
                    if path.is_symlink() or not (path.is_file() or path.is_dir()):
                        continue
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)

    def copy(self, live: Upper, upper: Upper) -> None:
        """Copy what a live sandbox wrote into an upper of its own. Some 50 us a file, and what its bytes take."""
        _lay_over(live.path / "diff", upper.path / "diff")

    def merge(self, ids: Sequence[str], upper: Upper) -> str:
        """Copy the layers ids, topmost first, into upper; make that a layer that stands for all of them; return its id.

        Copies, not hard links: those would change the link counts that `ls -l` shows.
        """
        for layer in reversed(ids):
            _lay_over(self.frozen / layer / "diff", upper.path / "diff")
        meta = self.meta(ids[0])
        meta["size_bytes"] = sum(self.size_bytes(layer) for layer in ids)
        return self.freeze(upper, meta)


def mergeable(ids: Sequence[str], sizes: dict[str, int]) -> list[str]:
    """Return the run of neighbouring layers (topmost first) that is best merged: the longest of small ones (pure)."""
    best: list[str] = []
    run: list[str] = []
    total = 0
    for layer in ids:
        size = sizes.get(layer, MERGE_BYTES)
        if total + size > MERGE_BYTES:
            run, total = [], 0
        if size <= MERGE_BYTES:
            run.append(layer)
            total += size
        if len(run) > len(best):
            best = list(run)
    return best if len(best) > 1 else []


OPAQUE = "user.overlay.opaque"


def is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _lay_over(source: Path, target: Path) -> None:
    """Copy an upper layer's directory over a merged one, as overlayfs would show the two."""
    links: dict[int, Path] = {}
    _lay_entries(source, target, links)


def _lay_entries(source: Path, target: Path, links: dict[int, Path]) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            into = target / entry.name
            if stat.S_ISDIR(status.st_mode):
                _lay_directory(Path(entry.path), into, links)
                continue
            _remove_any(into)
            if status.st_nlink > 1 and not is_whiteout(status) and status.st_ino in links:
                os.link(links[status.st_ino], into, follow_symlinks=False)
                continue
            links[status.st_ino] = into
            _copy(Path(entry.path), into, status)
    _copy_facts(source, target)


def _lay_directory(source: Path, into: Path, links: dict[int, Path]) -> None:
    below = None
    with contextlib.suppress(FileNotFoundError):
        below = into.lstat()
    opaque = _opaque(source)
    if below is not None and (opaque or not stat.S_ISDIR(below.st_mode)):
        # A directory over a whiteout or a file hides what lower layers have there.
        opaque = True
        _remove_any(into)
        below = None
    if below is None:
        into.mkdir()
    elif _opaque(into):
        opaque = True
    _lay_entries(source, into, links)
    if opaque:
        os.setxattr(into, OPAQUE, b"y")


def _opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False


def _copy(source: Path, target: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        with source.open("rb") as reading, target.open("xb") as writing:
            # The kernel shares the blocks where the file system can.
            while os.copy_file_range(reading.fileno(), writing.fileno(), 1 << 30):
                pass
    elif stat.S_ISLNK(status.st_mode):
        # Not pathlib's way to read it, which would make "./d/" a "d".
        target.symlink_to(os.readlink(source))  # noqa: PTH115
    else:
        os.mknod(target, status.st_mode, status.st_rdev)
    _copy_facts(source, target)


def _copy_facts(source: Path, target: Path) -> None:
    status = source.lstat()
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        target.chmod(stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        value = os.getxattr(source, name, follow_symlinks=False)
        # What refers to the inode it was copied up from means nothing for a copy.
        if name == OPAQUE or not name.startswith("user.overlay."):
            os.setxattr(target, name, value, follow_symlinks=False)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _remove_any(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()
