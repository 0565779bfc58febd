"""Did the host stay as it was? Names, kinds, sizes and times of what sandboxed commands must not reach."""

import os
from collections.abc import Iterable

ROOTS = ("/etc", "/usr", "/bin", "/sbin", "/lib", "/boot", "/root", "/home", "/opt", "/srv", "/var", "/mnt", "/media")
TOP = "/"

Fingerprint = dict[str, tuple[int, int, int, int, int]]


def fingerprint(roots: Iterable[str] = ROOTS) -> Fingerprint:
    """Return for each path below roots, and each name in /, its mode, owner, size and modification time (ns).

    Directories count without their size and time: what comes and goes in them is seen by its own path. Links are not
    followed, other file systems and what cannot be read are left out. Some 25 µs a path.
    """
    found: Fingerprint = {}
    with os.scandir(TOP) as entries:
        for entry in entries:
            found[entry.path] = (entry.stat(follow_symlinks=False).st_mode, 0, 0, 0, 0)
    for root in roots:
        if not os.path.islink(root) and os.path.isdir(root):  # noqa: PTH112, PTH114 - a walk of 100,000 paths
            _walk(root, os.lstat(root).st_dev, found)
    return found


def _walk(root: str, device: int, found: Fingerprint) -> None:
    pending = [root]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    stat = entry.stat(follow_symlinks=False)
                    is_folder = entry.is_dir(follow_symlinks=False)
                    changing = (0, 0) if is_folder else (stat.st_size, stat.st_mtime_ns)
                    found[entry.path] = (stat.st_mode, stat.st_uid, stat.st_gid, *changing)
                    if is_folder and stat.st_dev == device:
                        pending.append(entry.path)
        except OSError:  # It went away meanwhile, or is not ours to read.
            continue


def changed(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return the paths that came, went or changed, sorted."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
