"""Overlay layers on disk: each sandbox writes to an upper of its own, and freezing makes the upper a layer.

    uppers/<id>/diff, work          what a live sandbox writes; deleted with the sandbox
    layers/<id>/diff, meta.json     a frozen layer, never changed again

Ids are random and never used twice. A layer exists if and only if it has `meta.json`. So freezing writes `meta.json`
before it renames the upper, and deleting removes `meta.json` first; `open` removes what a crash left in between.

Whiteouts and opaque directories follow overlayfs (kernel documentation, filesystems/overlayfs.rst): a character
device 0/0 hides a name of lower layers, and the attribute `user.overlay.opaque` hides a directory's lower entries.
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

MAX_DEPTH = 24
"""Layers above the root state at which small ones are merged: a lookup costs 0.5 us for each layer and name."""

MERGE_BYTES = 64 << 20
"""Largest total size of layers that are merged: merging copies them while a call waits. The value is an estimate."""


class Upper(NamedTuple):
    """A directory that one live sandbox writes to.

    Attributes:
        id: The name that its layer will have.
        path: The directory of its `diff` and `work`.
    """

    id: str
    path: Path


class Layers:
    """The layers of one data directory. Methods block, for microseconds unless they say otherwise.

    Attributes:
        uppers: The directory of all uppers.
        frozen: The directory of all layers.
    """

    def __init__(self, data_dir: Path) -> None:
        """Name the directories; `open` makes them."""
        self.uppers = data_dir / "uppers"
        self.frozen = data_dir / "layers"
        self._sizes: dict[str, int] = {}

    def open(self) -> None:
        """Make the directories; remove uppers of dead sandboxes and half-deleted layers. It takes seconds at worst."""
        for folder in (self.uppers, self.frozen):
            folder.mkdir(parents=True, exist_ok=True)
        # The driver's lock is held, so each upper here belongs to a sandbox whose processes are dead.
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
            # overlayfs needs `work` on the same file system as the upper (overlayfs.rst).
            (upper.path / part).mkdir()
        # The mode of the upper directory is the mode of the sandbox's root.
        (upper.path / "diff").chmod(0o755)
        return upper

    def freeze(self, upper: Upper, meta: dict[str, Any]) -> str:
        """Make an upper a layer. A sandbox may still have it mounted, but must not write to it any more.

        Args:
            upper: The upper.
            meta: Its delta (None if it is too large to know) and its `size_bytes`.

        Returns:
            The layer's id.
        """
        # A kill -9 between these lines leaves an upper with meta.json, which `open` removes like any other upper.
        (upper.path / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
        upper.path.rename(self.frozen / upper.id)
        # A layer never changes, so its size is read from the disk at most once.
        self._sizes[upper.id] = int(meta["size_bytes"])
        return upper.id

    def lowers(self, ids: Sequence[str]) -> list[str]:
        """Return the directories of layers, for a mount."""
        return [str(self.frozen / layer / "diff") for layer in ids]

    def missing(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that name no layer, or one that was deleted."""
        return [layer for layer in ids if not (self.frozen / layer / "meta.json").exists()]

    def meta(self, layer: str) -> dict[str, Any]:
        """Return what was stored with a layer; see `freeze`."""
        meta: dict[str, Any] = json.loads((self.frozen / layer / "meta.json").read_bytes())
        return meta

    def size_bytes(self, layer: str) -> int:
        """Return the bytes that a layer occupies."""
        if layer not in self._sizes:
            self._sizes[layer] = int(self.meta(layer)["size_bytes"])
        return self._sizes[layer]

    def all(self) -> set[str]:
        """Return the ids of all layers."""
        return {path.name for path in self.frozen.iterdir()}

    def disown(self, ids: Iterable[str]) -> None:
        """Make layers that will be deleted missing from now on; 10 us each."""
        for layer in ids:
            with contextlib.suppress(FileNotFoundError):
                (self.frozen / layer / "meta.json").unlink()

    def drop(self, ids: Iterable[str]) -> None:
        """Delete layers; milliseconds for a thousand files."""
        for layer in ids:
            # meta.json first: after a crash in between, `open` recognizes the layer as half deleted.
            self.disown([layer])
            remove_tree(self.frozen / layer)
            self._sizes.pop(layer, None)

    def undo(self, uppers: Iterable[Upper]) -> None:
        """Delete uppers that were to become layers, whether or not they already have."""
        for upper in uppers:
            remove_tree(upper.path)
            self.drop([upper.id])

    def sync(self, ids: Iterable[str]) -> None:
        """Wait until layers are on disk, which takes from 1 ms to minutes, depending on their size."""
        for layer in ids:
            # fsync of a file does not write its directory's entry (fsync(2)), so directories are synced as well.
            for folder, _, files in os.walk(self.frozen / layer, topdown=False):
                # Files before their directory: a directory's entries must not point to files that are not on disk yet.
                for path in (*(Path(folder) / name for name in files), Path(folder)):
                    if path.is_symlink() or not (path.is_file() or path.is_dir()):
                        continue
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)

    def copy(self, live: Upper, upper: Upper) -> None:
        """Copy what a live sandbox wrote into another upper; 50 us a file, and the time for its bytes."""
        _lay_over(live.path / "diff", upper.path / "diff")

    def merge(self, ids: Sequence[str], upper: Upper) -> str:
        """Merge layers into one that replaces them all.

        Files are copied, not hard-linked: a hard link would change the link counts that `ls -l` shows.

        Args:
            ids: The layers, the topmost first.
            upper: An empty upper, which becomes the merged layer.

        Returns:
            The merged layer's id.
        """
        # From the lowest to the topmost, so that later layers win as they do in the mount.
        for layer in reversed(ids):
            _lay_over(self.frozen / layer / "diff", upper.path / "diff")
        # The topmost layer's delta covers everything below it.
        meta = self.meta(ids[0])
        meta["size_bytes"] = sum(self.size_bytes(layer) for layer in ids)
        return self.freeze(upper, meta)


def mergeable(ids: Sequence[str], sizes: dict[str, int]) -> list[str]:
    """Return the longest run of neighbouring layers whose total size is at most `MERGE_BYTES` (pure).

    Args:
        ids: The layers, the topmost first.
        sizes: Their sizes in bytes; a layer without an entry is not merged.

    Returns:
        The run, the topmost first; empty if no two neighbours are small enough.
    """
    best: list[str] = []
    run: list[str] = []
    total = 0
    for layer in ids:
        # An unknown size counts as the maximum, so the layer is not merged with a neighbour that holds anything.
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
"""The attribute of a directory that hides the entries of lower layers; `user.`, because mounts use `userxattr`."""


def is_whiteout(status: os.stat_result) -> bool:
    """Return whether a file is a whiteout, which hides a name of lower layers."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _lay_over(source: Path, target: Path) -> None:
    """Copy an upper layer over a merged one, so that the result shows what overlayfs shows of the two."""
    links: dict[int, Path] = {}
    _lay_entries(source, target, links)


def _lay_entries(source: Path, target: Path, links: dict[int, Path]) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            into = target / entry.name
            # Directories have link counts of their own, so they never take part in hard links.
            if stat.S_ISDIR(status.st_mode):
                _lay_directory(Path(entry.path), into, links)
                continue
            _remove_any(into)
            # Hard links within the layer stay hard links. Whiteouts may share an inode, too; each is made separately.
            if status.st_nlink > 1 and not is_whiteout(status) and status.st_ino in links:
                os.link(links[status.st_ino], into, follow_symlinks=False)
                continue
            links[status.st_ino] = into
            _copy(Path(entry.path), into, status)
    _copy_attributes(source, target)


def _lay_directory(source: Path, into: Path, links: dict[int, Path]) -> None:
    """Merge one directory, with the cases of overlayfs: new, merged, opaque, or instead of something else."""
    below = None
    with contextlib.suppress(FileNotFoundError):
        below = into.lstat()
    opaque = _opaque(source)
    if below is not None and (opaque or not stat.S_ISDIR(below.st_mode)):
        # A directory over a whiteout or a file hides what the layers below have there, so it becomes opaque.
        opaque = True
        _remove_any(into)
        below = None
    if below is None:
        into.mkdir()
    elif _opaque(into):
        # The lower of the two was opaque already, so the merged directory is.
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
            # File systems with reflinks share the blocks instead of copying them.
            # Without offsets both files advance, and 0 means the end of the file (copy_file_range(2)).
            while os.copy_file_range(reading.fileno(), writing.fileno(), 1 << 30):
                pass
    elif stat.S_ISLNK(status.st_mode):
        # Path.readlink would normalize "./d/" to "d".
        target.symlink_to(os.readlink(source))  # noqa: PTH115
    else:
        os.mknod(target, status.st_mode, status.st_rdev)
    _copy_attributes(source, target)


def _copy_attributes(source: Path, target: Path) -> None:
    status = source.lstat()
    # Owner before mode, because chown clears set-user-id bits (chown(2)).
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        target.chmod(stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        value = os.getxattr(source, name, follow_symlinks=False)
        # Other attributes of overlayfs refer to the inode that a file was copied up from, which a copy does not have.
        if name == OPAQUE or not name.startswith("user.overlay."):
            os.setxattr(target, name, value, follow_symlinks=False)
    # Last: entries that are made in a directory change its time.
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
