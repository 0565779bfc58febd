"""The directories of videos and of what was made of them: named by content, written once, shared by all sandboxes.

A part is a directory below `parts`: `v-…` a video with what it is, `m-…` what was measured, `d-…` what a model said.
"""

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from sandboxes.errors import StateGoneError

VIDEO, INFO = "video", "info.json"
_MANIFEST = "manifest.json"


def part_name(kind: str, *told: Any) -> str:
    """Return the name of a part: a digest of all that its content follows from."""
    digest = hashlib.blake2b(orjson.dumps(told, option=orjson.OPT_SORT_KEYS), digest_size=20)
    return f"{kind}-{digest.hexdigest()}"


class VideoStore:
    """Knows the directories. What blocks here is called in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts, self._work = folder / "parts", folder / "work"
        self._adopting = threading.Lock()

    def open(self) -> None:
        """Get the directories ready, and remove what was half written."""
        shutil.rmtree(self._work, ignore_errors=True)
        for folder in (self._parts, self._work, self.folder / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        for part in self._parts.iterdir():
            if not (part / _MANIFEST).exists():
                shutil.rmtree(part, ignore_errors=True)

    def new(self) -> Path:
        """Return a new directory to write a part in."""
        folder = self._work / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder

    def path(self, part: str) -> Path:
        return self._parts / part

    def all(self) -> set[str]:
        return {path.name for path in self._parts.iterdir()}

    def has(self, part: str) -> bool:
        """Say whether a part is there, all of it as it was written."""
        try:
            sizes = self._sizes(part)
            return all((self._parts / part / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    def check(self, part: str) -> None:
        """Look whether a part is there.

        Raises:
            StateGone: it is not, or is damaged.
        """
        if not self.has(part):
            raise StateGoneError(f"what was made of a video, {part}, is gone; replay its path instead")

    def adopt(self, folder: Path, part: str) -> None:
        """Make a directory a part; it moves there. Where somebody made the same meanwhile, theirs stays."""
        sizes = {}
        for path in sorted(folder.iterdir()):
            sizes[path.name] = path.stat().st_size
            _sync(path)
        # Manifest last: a part without one is half written. It outlives snapshots, so all of it is on the disk before.
        (folder / _MANIFEST).write_bytes(orjson.dumps(sizes))
        _sync(folder / _MANIFEST)
        _sync(folder)
        with self._adopting:
            if self.has(part):
                shutil.rmtree(folder)
                return
            shutil.rmtree(self._parts / part, ignore_errors=True)
            folder.rename(self._parts / part)

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def size_bytes(self, part: str) -> int:
        try:
            return sum(self._sizes(part).values())
        except (OSError, ValueError):
            return 0

    def drop(self, parts: Iterable[str]) -> None:
        for part in parts:
            # Without its manifest it is nothing, should the rest of it take long.
            (self._parts / part / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self._parts / part, ignore_errors=True)

    def info(self, part: str) -> dict[str, Any]:
        """Return what a video is."""
        found: dict[str, Any] = orjson.loads((self._parts / part / INFO).read_bytes())
        return found

    def _sizes(self, part: str) -> dict[str, int]:
        found: dict[str, int] = orjson.loads((self._parts / part / _MANIFEST).read_bytes())
        return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
