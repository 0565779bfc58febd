"""Whether Docker's directories of layers (storage driver overlay2) can be the lower layers of a sandbox as they are.

They can if the sandbox sees exactly what it would see of the same image in a file, unpacked by this room:

- Docker's marks for overlayfs (`trusted.overlay.*`) mean nothing in the mounts of sandboxes (`user.overlay.*`). So an
  opaque directory must have nothing to hide, and no other mark may be there. Overlayfs marks each new directory.
- A device node would give access to a device of the host. Whiteouts are the same in both.
- Layers that were built here have times of nanoseconds, and layers in files have times of seconds.
- A file with several names shows their number, also those that another layer hides.

It runs as `python -m sandboxes.images.docker_layers DIRECTORY...`, topmost first, and prints what is wrong, or nothing.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence

from sandboxes.images.root_tar import is_kept
from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened, close_all
from sandboxes.linux.file_copy import is_whiteout

_OPAQUE = "trusted.overlay.opaque"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LABELS = "security.selinux"
"""A label of this machine, which no image has."""


def first_missing(layers: Sequence[str]) -> str | None:
    """Return the first of some directories that does not exist (any more): Docker may remove its own. Microseconds."""
    return next((layer for layer in layers if not os.path.isdir(layer)), None)  # noqa: PTH112 - this is in each call


def obstacle(layers: Sequence[str]) -> str:
    """Return why layers cannot be used in place, topmost first; empty if they can be. Blocking."""
    program = [sys.executable, "-m", "sandboxes.images.docker_layers", *layers]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603 - our own program
    output = done.stderr if done.returncode else done.stdout
    return output.decode(errors="replace").strip()[-200:]


def _obstacle(layers: Sequence[str]) -> str:
    opened = [os.open(layer, _FOLDER) for layer in layers]
    try:
        for number, layer in enumerate(opened):
            if what := _obstacle_in(layer, opened[:number], opened[number + 1 :]):
                return what
    except (OSError, trees.TreeTooDeepError) as error:
        return str(error)
    finally:
        close_all(opened)
    return ""


def _obstacle_in(layer: int, above: Sequence[int], below: Sequence[int]) -> str:
    for folder in trees.folders(layer):
        marks = os.listxattr(folder.fd)
        if _OPAQUE in marks and any(_has_folder(lower, folder.path) for lower in below):
            return f"{folder.path} hides a directory of another layer"
        if other := [name for name in marks if name not in {_OPAQUE, _LABELS} and not is_kept(name)]:
            return f"{folder.path} has the attribute {other[0]}"
        for entry in folder.entries:
            if what := _obstacle_at(folder, entry, above):
                return f"{folder.path}{entry.name} {what}"
    return ""


def _obstacle_at(folder: trees.Folder, entry: os.DirEntry[str], above: Sequence[int]) -> str:
    status = entry.stat(follow_symlinks=False)
    if is_whiteout(status):
        return ""
    if status.st_mtime_ns % 1_000_000_000:
        return "has a time of nanoseconds"
    if stat.S_ISREG(status.st_mode):
        attributes = os.listxattr(f"/proc/self/fd/{folder.fd}/{entry.name}", follow_symlinks=False)
        if other := [name for name in attributes if name != _LABELS and not is_kept(name)]:
            return f"has the attribute {other[0]}"
        if status.st_nlink > 1 and any(_hides(layer, folder.path + entry.name) for layer in above):
            return "is a further name of a file, and another layer hides it"
    elif stat.S_IFMT(status.st_mode) not in {stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO}:
        return "is a device or a socket"
    return ""


def _hides(layer: int, path: str) -> bool:
    ends = [at for at, character in enumerate(path) if character == "/"]
    for end in (*ends, len(path)):
        try:
            # All above it are directories and no links.
            status = os.stat(path[:end], dir_fd=layer, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(status.st_mode):
            return True
    return True


def _has_folder(layer: int, path: str) -> bool:
    fd = trees.open_below(layer, path)
    if fd is None:
        return False
    with Opened(fd):
        return True


if __name__ == "__main__":
    print(_obstacle(sys.argv[1:]))
