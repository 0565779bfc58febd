"""Digests of what a spec names outside itself: base directories, tarballs and databases on this machine."""

import errno
import hashlib
import os
from pathlib import Path

from sandboxes.errors import SpecError
from sandboxes.host.source_watch import DirectoryDigests
from sandboxes.linux.plain_paths import open_plain
from sandboxes.sources import SourceRules

_MACHINE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors of the machine, which say nothing about the path that a spec names."""


class SourceDigests:
    """Digests directories and files. A file is read again only when its inode has changed."""

    def __init__(self) -> None:
        # By process and not on disk: after a restart each file is read once more.
        self._file_digests: dict[_FileFacts, str] = {}
        self.directories = DirectoryDigests()
        # What each source was when it was last digested: a directory's real path, or the status of a file.
        self._seen: dict[str, str | _FileFacts] = {}

    def known(self, source: str) -> str | None:
        """Return the digest of a source if it is certainly unchanged since `of_source`; microseconds, no blocking."""
        seen = self._seen.get(source)
        try:
            # Links are followed: one that leads elsewhere shows another device and inode.
            status = None if seen is None else os.stat(source)  # noqa: PTH116
        except OSError:
            return None
        if isinstance(seen, str) and status is not None:
            return self.directories.known(seen, status)
        return None if status is None or _facts(status) != seen else self._file_digests.get(_facts(status))

    def of_source(self, source: str, rules: SourceRules, *, confined: bool) -> str:
        """Return a digest of a directory's or file's content. `confined` allows allowed sources only.

        Blocking, if it has changed: a directory is walked in a child process, a file is read. Raises SpecError if the
        path is forbidden, missing or cannot be read, and OSError if the machine is short of memory, descriptors or
        disk.
        """
        real = Path(rules.real(source, confined=confined))
        try:
            with open_plain(real) as path:
                # A directory is digested by its entries' facts: reading a base of gigabytes for each new task would
                # take minutes.
                if path.is_dir():
                    return self.of_directory(path, name=source, real=str(real))
                return self.of_file(path, name=source)
        except OSError as error:
            raise_machine_error(error)
            raise SpecError(
                f"{source!r} cannot be read: {error.strerror}. Name a tarball, directory or database."
            ) from error

    def of_directory(self, path: Path, *, name: str, real: str) -> str:
        """Return a digest of a directory that `open_plain` opened, by its name in specs and its real path."""
        self._seen[name] = real
        return self.directories.of(path, real)

    def of_file(self, path: Path, *, name: str) -> str:
        """Return the SHA-256 of a regular file that `open_plain` opened; `name` is its name in specs."""
        facts = _facts(path.stat())
        if not path.is_file():
            raise OSError(0, "neither a directory nor a regular file")
        # The facts are read first: a file that changes while it is read has other facts afterwards.
        if facts not in self._file_digests:
            with path.open("rb") as file:
                self._file_digests[facts] = hashlib.file_digest(file, "sha256").hexdigest()
        self._seen[name] = facts
        return self._file_digests[facts]


_FileFacts = tuple[int, int, int, int, int]


def _facts(status: os.stat_result) -> _FileFacts:
    # With the time of the inode's last change, which no program can set: a copy may keep size and modification time.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def raise_machine_error(error: Exception) -> None:
    """Raise the error again if it is the machine's fault, so that no spec is blamed for it."""
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        raise error
