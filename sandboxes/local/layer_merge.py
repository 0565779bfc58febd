"""How one layer is laid over another, so that the result shows what overlayfs shows of the two.

Whiteouts and opaque directories follow overlayfs (kernel documentation, filesystems/overlayfs.rst): a character device
0/0 hides a name of lower layers, and the attribute `user.overlay.opaque` hides a directory's lower entries.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_copy import OPAQUE, copy_entry, copy_facts, is_opaque, is_whiteout
from sandboxes.linux.file_flags import copy_flags
from sandboxes.linux.files import remove_entry

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def lay_over(source: Path, target: Path, is_replaced: Callable[[str], bool] = lambda _: False) -> None:
    """Copy an upper layer over a merged one, so that the result shows what overlayfs shows of the two."""
    # A path that is no directory is not copied if something else will be laid over it (`is_replaced`).
    with contextlib.ExitStack() as opened:
        layer, merged = (os.open(path, _FOLDER) for path in (source, target))
        opened.callback(os.close, layer)
        opened.callback(os.close, merged)
        # By inode. Directories have link counts of their own, so they never take part in hard links.
        links: dict[int, str] = {}
        laid: list[tuple[str, bool]] = []
        for folder in trees.folders(layer):
            laid.append((folder.path, _make_folder(folder.path, folder.fd, merged)))
            with Opened(_open_folder(merged, folder.path)) as into:
                for entry in folder.entries:
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode) and not is_replaced(folder.path + entry.name):
                        _lay_entry(folder, entry.name, status, (into, merged), links)
        # The inner directories first: entries that are made in a directory change its time.
        for path, opaque in reversed(laid):
            _finish_folder(path, layer, merged, opaque=opaque)


def has_entry(layer: Path, path: str) -> bool:
    """Return whether a layer has something at a path that is no directory, so that it replaces all below it."""
    folder, _, name = path.rpartition("/")
    with Opened(os.open(layer, _FOLDER)) as top, contextlib.suppress(FileNotFoundError):
        within = trees.open_below(top, folder)
        if within is not None:
            with Opened(within):
                return not stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
    return False


def _make_folder(path: str, layer: int, merged: int) -> bool:
    """Make a directory of the merged layer, by the cases of overlayfs; return whether it is opaque there."""
    opaque = is_opaque(layer)
    folder, _, name = path.rstrip("/").rpartition("/")
    if not name:
        return opaque
    with Opened(_open_folder(merged, folder)) as above:
        below = None
        with contextlib.suppress(FileNotFoundError):
            below = os.stat(name, dir_fd=above, follow_symlinks=False)
        if below is not None and (opaque or not stat.S_ISDIR(below.st_mode)):
            # A directory over a whiteout or a file hides what the layers below have there, so it becomes opaque.
            opaque = True
            remove_entry(name, above, force=True)
            below = None
        if below is None:
            os.mkdir(name, 0o700, dir_fd=above)
            return opaque
    with Opened(_open_folder(merged, path)) as into:
        # The lower of the two may have been opaque already, and then the merged directory is.
        return opaque or is_opaque(into)


def _lay_entry(
    folder: trees.Folder, name: str, status: os.stat_result, targets: tuple[int, int], links: dict[int, str]
) -> None:
    into, merged = targets
    remove_entry(name, into, force=True)
    # Hard links within the layer stay hard links. Whiteouts may share an inode, too; each is made separately.
    path = folder.path + name
    shared = status.st_nlink > 1 and not is_whiteout(status)
    if shared and (first := links.setdefault(status.st_ino, path)) != path:
        os.link(first, name, src_dir_fd=merged, dst_dir_fd=into, follow_symlinks=False)
        return
    copy_entry(name, status, folder.fd, into)


def _finish_folder(path: str, layer: int, merged: int, *, opaque: bool) -> None:
    source, target = _open_folder(layer, path), _open_folder(merged, path)
    try:
        if opaque:
            os.setxattr(target, OPAQUE, b"y")
        copy_flags(source, target)
        copy_facts(".", os.fstat(source), source, target)
    finally:
        os.close(source)
        os.close(target)


def _open_folder(top: int, path: str) -> int:
    folder = trees.open_below(top, path)
    if folder is None:
        raise FileNotFoundError(f"directory {path!r} of a layer is gone")
    return folder
