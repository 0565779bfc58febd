"""Parts of states on the disk, which sandboxes share: directories that are written once.

The manifest of a part has the digests of its files, and is written last: a directory without one is incomplete, and is
removed at the next start. A part is read completely before its first use in a process that did not write it, because a
disk may have changed a byte.
"""

import logging
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from sandboxes.linux.files import file_digest

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NEW = "new-"
"""How the names of directories begin that are no parts yet."""


class PartStore:
    """The parts below a directory. Methods that read or write files block, and are called in threads."""

    def __init__(self, parts: Path, kind: str) -> None:
        """Name the directory, and what its parts are, for the log."""
        self.parts, self._kind = parts, kind
        self.intact: set[str] = set()  # The parts that this process has written itself or read completely.
        self._manifests: dict[str, dict[str, Any]] = {}
        self._reading = threading.Lock()

    def open(self) -> None:
        """Make the directory, and remove incomplete parts."""
        self.parts.mkdir(parents=True, exist_ok=True)
        for part in self.parts.iterdir():
            if not (part / MANIFEST).exists():
                shutil.rmtree(part, ignore_errors=True)

    def all(self) -> set[str]:
        """Return the names of all parts."""
        return {path.name for path in self.parts.iterdir() if not path.name.startswith(NEW)}

    def has(self, part: str) -> bool:
        """Return whether a complete part of this name exists."""
        return (self.parts / part / MANIFEST).exists()

    def is_whole(self, part: str) -> bool:
        """Return whether a part exists as it was written. One that was changed is deleted. Blocking the first time."""
        if not self.has(part):
            return False
        with self._reading:
            if part in self.intact:
                return True
            try:
                digests = self.manifest(part)["digests"]
                whole = all(file_digest(self.parts / part / name) == digest for name, digest in digests.items())
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                whole = False
            if whole:
                self.intact.add(part)
            else:
                _log.error("%s %s is damaged, and is made again", self._kind, part)
                self.drop([part])
            return whole

    def drop(self, parts: Iterable[str]) -> None:
        """Delete parts."""
        for part in parts:
            self._manifests.pop(part, None)
            self.intact.discard(part)
            # First the manifest: without it the part is incomplete, should the process be killed in between.
            (self.parts / part / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.parts / part, ignore_errors=True)

    def manifest(self, part: str) -> dict[str, Any]:
        """Return the manifest of a part. Raises OSError or ValueError if there is none that can be read."""
        manifest = self._manifests.get(part)
        if manifest is None:
            manifest = self._manifests[part] = orjson.loads((self.parts / part / MANIFEST).read_bytes())
        return manifest
