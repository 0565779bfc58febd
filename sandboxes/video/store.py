"""The store of videos and of what was made from them.

A part is a directory below `parts`, named by a digest of what its content follows from, written once, and shared by all
sandboxes. `v-…` is a video with its properties, `m-…` are measurements, `d-…` are a model's captions. A part is written
below `work` and then renamed; its manifest of sizes and digests is written last, so one without is removed at the next
start. A part is read completely before its first use in a process that did not write it.
"""

import hashlib
import logging
import secrets
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from sandboxes.errors import StateGoneError
from sandboxes.linux.files import file_digest, sync_path

_log = logging.getLogger(__name__)

VIDEO, INFO = "video", "info.json"
_MANIFEST = "manifest.json"


def part_name(kind: str, *sources: Any) -> str:
    """Return the name of a part: its kind, and a digest of everything that its content follows from."""
    digest = hashlib.blake2b(orjson.dumps(sources, option=orjson.OPT_SORT_KEYS), digest_size=20)
    return f"{kind}-{digest.hexdigest()}"


class VideoStore:
    """The directories of one store. Methods that read or write files block and are called in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts, self._work = folder / "parts", folder / "work"
        self._adopting, self._reading = threading.Lock(), threading.Lock()
        # Parts that this process has written itself or read completely.
        self._intact: set[str] = set()

    def open(self) -> None:
        """Make the directories, and remove incomplete parts."""
        shutil.rmtree(self._work, ignore_errors=True)
        for folder in (self._parts, self._work, self.folder / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        for part in self._parts.iterdir():
            if not (part / _MANIFEST).exists():
                shutil.rmtree(part, ignore_errors=True)

    def new(self) -> Path:
        """Return a new directory in which a part can be written."""
        folder = self._work / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder

    def path(self, part: str) -> Path:
        """Return the directory of a part."""
        return self._parts / part

    def all(self) -> set[str]:
        """Return the names of all parts."""
        return {path.name for path in self._parts.iterdir()}

    def has(self, part: str) -> bool:
        """Return whether a part exists and its files have the sizes that were written."""
        try:
            sizes = self._sizes(part)
            return all((self._parts / part / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    def is_whole(self, part: str) -> bool:
        """Return whether a part exists as it was written. One that was changed is deleted. Blocking the first time."""
        if not self.has(part):
            return False
        with self._reading:
            if part in self._intact:
                return True
            try:
                digests = self._manifest(part)["digests"]
                whole = all(file_digest(self._parts / part / name) == digest for name, digest in digests.items())
            except (OSError, ValueError, KeyError):
                whole = False
            if whole:
                self._intact.add(part)
            else:
                _log.error("part %s of a video is damaged, and is made again", part)
                self.drop([part])
            return whole

    def check(self, part: str) -> None:
        """Raise StateGoneError unless a part exists as it was written. Blocking the first time."""
        if not self.is_whole(part):
            raise StateGoneError(f"part {part} of a video is missing or damaged; its path is replayed instead")

    def adopt(self, folder: Path, part: str) -> None:
        """Make a part of a directory, which is moved. If the same part was made meanwhile, that one stays."""
        sizes, digests = {}, {}
        for path in sorted(folder.iterdir()):
            sizes[path.name], digests[path.name] = path.stat().st_size, file_digest(path)
            sync_path(path)
        # Parts outlive losses of power, so the files are on the disk before the manifest says that they are complete.
        (folder / _MANIFEST).write_bytes(orjson.dumps({"sizes": sizes, "digests": digests}))
        sync_path(folder / _MANIFEST)
        sync_path(folder)
        with self._adopting:
            if self.has(part):
                shutil.rmtree(folder)
                return
            shutil.rmtree(self._parts / part, ignore_errors=True)
            folder.rename(self._parts / part)
            self._intact.add(part)

    def discard(self, folder: Path) -> None:
        """Delete a directory of `new`, unless it became a part."""
        shutil.rmtree(folder, ignore_errors=True)

    def size_bytes(self, part: str) -> int:
        """Return the size of a part; 0 if it is missing."""
        try:
            return sum(self._sizes(part).values())
        except (OSError, ValueError):
            return 0

    def drop(self, parts: Iterable[str]) -> None:
        """Delete parts."""
        for part in parts:
            self._intact.discard(part)
            # First the manifest: without it the part is incomplete, should the process be killed in between.
            (self._parts / part / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self._parts / part, ignore_errors=True)

    def info(self, part: str) -> dict[str, Any]:
        """Return the properties of a video, from `probe`."""
        info: dict[str, Any] = orjson.loads((self._parts / part / INFO).read_bytes())
        return info

    def _sizes(self, part: str) -> dict[str, int]:
        sizes: dict[str, int] = self._manifest(part)["sizes"]
        return sizes

    def _manifest(self, part: str) -> dict[str, Any]:
        """Return the manifest of a part; ValueError if it is damaged, or without digests (an earlier version's)."""
        manifest: Any = orjson.loads((self._parts / part / _MANIFEST).read_bytes())
        if not isinstance(manifest, dict) or set(manifest) != {"sizes", "digests"}:
            raise ValueError("the manifest of a part has other members")
        return manifest
