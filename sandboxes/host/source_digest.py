"""Digests of what a spec names outside itself: base directories, tarballs and databases on this machine."""

import errno
import hashlib
import os
import stat
from pathlib import Path

from sandboxes.errors import SpecError

_MACHINE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors of the machine, which say nothing about the path that a spec names."""


class SourceDigests:
    """Digests directories and files. A file is read again only when its size or modification time has changed."""

    def __init__(self) -> None:
        # By process and not on disk: after a restart each file is read once more.
        self._file_digests: dict[tuple[str, int, int], str] = {}

    def of(self, source: Path) -> str:
        """Return a digest of a directory's or file's content. Blocking: 5 us an entry, or one reading of the file.

        Raises:
            SpecError: The path is missing or cannot be read.
            OSError: The machine is short of memory, descriptors or disk.
        """
        try:
            # A directory is digested by its entries' facts: reading a base of gigabytes for each new task would
            # take minutes.
            return directory_digest(source) if source.is_dir() else self.of_file(source)
        except OSError as error:
            raise_machine_error(error)
            raise SpecError(
                f"{str(source)!r} cannot be read: {error.strerror}. Name a tarball, directory or database."
            ) from error

    def of_file(self, path: Path) -> str:
        """Return the SHA-256 of a regular file.

        Raises:
            OSError: The path is missing, no regular file, or cannot be read.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "neither a directory nor a regular file")
        # A file that changes within one tick of its clock and keeps its size is missed, as by make and rsync.
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in self._file_digests:
            with path.open("rb") as file:
                self._file_digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._file_digests[key]


def directory_digest(root: Path) -> str:
    """Digest path, size, modification time, mode and owner of all entries below root. Blocking: 5 us an entry."""
    digest = hashlib.blake2b(digest_size=16)
    for folder, names, files in os.walk(root):
        # In place, so that os.walk descends in this order too: the digest must not depend on the directory's order.
        names.sort()
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)  # noqa: PTH118 - a hundred thousand times
            # `lstat`: a link is content itself, and what it leads to may be outside.
            status = os.lstat(path)
            facts = (os.path.relpath(path, root), status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid)
            # Names are bytes to the kernel; `surrogateescape` gives back those that are no UTF-8.
            digest.update(repr(facts).encode(errors="surrogateescape"))
    return digest.hexdigest()


def raise_machine_error(error: Exception) -> None:
    """Raise the error again if it is the machine's fault, so that no spec is blamed for it."""
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        raise error
