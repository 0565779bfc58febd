"""Manifests: two digests of a frozen directory tree, by which damage on disk is noticed.

The supervisor of a sandbox knows both without reading anything again, because it has looked at every entry already.
Each later use of the tree computes them from the disk and compares. Owners and extended attributes are not part of a
manifest: they read differently in a user namespace.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from sandboxes.guest.files import facts
from sandboxes.linux import trees
from sandboxes.linux.file_copy import is_opaque


class Manifest(NamedTuple):
    """The digests of a tree."""

    stats: bytes  # A digest of names, modes, sizes and times..
    contents: bytes  # A digest of the content of files, of link targets, and of what directories hide..


class Item(NamedTuple):
    """One entry of a tree. `content` is the hash of its content; `OPAQUE` for a directory that hides what is below."""

    path: str
    mode: int
    size: int
    mtime_ns: int
    content: bytes


OPAQUE = b"opaque"
"""Stands for the content of a directory that hides the entries of lower layers."""


def of_items(items: Iterable[Item]) -> Manifest:
    """Return the manifest of a tree with these entries, in any order (pure)."""
    stats, contents = hashlib.sha256(), hashlib.sha256()
    # In the order of paths, because directories list their entries in any order.
    for item in sorted(items):
        name = os.fsencode(item.path) + b"\0"
        # The size of a directory depends on the file system.
        size = 0 if stat.S_ISDIR(item.mode) else item.size
        stats.update(name + f"{item.mode} {size} {item.mtime_ns}\0".encode())
        contents.update(name + item.content + b"\0")
    return Manifest(stats.digest(), contents.digest())


def of_tree(top: int, *, contents: bool, known: Mapping[str, bytes] = MappingProxyType({})) -> Manifest:
    """Return the manifest of a directory on disk; files with `known` hashes by path are not read."""
    items = []
    for folder in trees.folders(top):
        if folder.path and contents and is_opaque(folder.fd):
            # Beside the directory's own entry, so that a directory with the mark has another manifest.
            items.append(Item(folder.path.rstrip("/"), 0, 0, 0, OPAQUE))
        for entry in folder.entries:
            status = entry.stat(follow_symlinks=False)
            path, modified_ns = folder.path + entry.name, facts.modified_ns(status)
            content = known.get(path, b"")
            if contents and not content:
                content = facts.content(entry.name, status, folder.fd)
            items.append(Item(path, status.st_mode, status.st_size, modified_ns, content))
    return of_items(items)
