"""Which videos a task's `load_video` knows, and which file is which content."""

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from sandboxes.errors import SpecError
from sandboxes.video.faults import VideoError
from sandboxes.video_spec import VideoTools

_CHUNK = 1 << 20
FileStamp = tuple[int, int, int, int]
"""Device, number, size and time of change of a file: one that has them all is the file it was."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The videos by name. identity: a digest of what they are."""

    files: dict[str, Path]
    identity: str


class Contents:
    """Knows the SHA-256 of files, as long as they stay as they are."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, tuple[FileStamp, str]] = {}
        self._saving = threading.Lock()
        self._unsaved = False

    def open(self) -> None:
        """Read back what earlier instances found out."""
        with contextlib.suppress(OSError, ValueError):
            told = orjson.loads(self._memory.read_bytes())
            self._known = {path: (tuple(stamp), digest) for path, stamp, digest in told}

    def known(self, path: Path) -> str | None:
        """Return a file's digest, if it is known and the file is as it was."""
        found = self._known.get(str(path))
        return found[1] if found is not None and found[0] == stamp_of(path) else None

    def learn(self, path: Path, stamp: FileStamp, digest: str) -> None:
        self._known[str(path)] = stamp, digest
        self._unsaved = True

    def save(self) -> None:
        """Write down what was learnt."""
        with self._saving:
            if self._unsaved:
                self._unsaved = False
                partial = self._memory.with_suffix(".new")
                partial.write_bytes(orjson.dumps([[path, *known] for path, known in list(self._known.items())]))
                partial.replace(self._memory)

    def digest(self, path: Path) -> str:
        """Return a file's digest, reading it where that is not known."""
        known = self.known(path)
        if known is None:
            stamp = stamp_of(path)
            known = _read(path, lambda _: None)
            if stamp == stamp_of(path):
                self.learn(path, stamp, known)
        return known

    def copy(self, path: Path, target: Path, max_bytes: int) -> str:
        """Copy a file and return the digest of the copy.

        Raises:
            Fault: limit.
            OSError: it cannot be read, or target cannot be written.
        """
        stamp = stamp_of(path)
        if stamp[2] > max_bytes:
            raise VideoError(
                "limit",
                f"this file has {stamp[2] >> 20} MB; this task takes up to {max_bytes >> 20} MB (limits.disk_mb)",
            )
        with target.open("wb") as out:
            digest = _read(path, out.write)
        if stamp == stamp_of(path):
            self.learn(path, stamp, digest)
            self.save()
        return digest


def stamp_of(path: Path) -> FileStamp:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path, write: Callable[[bytes], object]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
            write(data)
    return digest.hexdigest()


async def catalogue_of(video: VideoTools, contents: Contents) -> Catalogue:
    """Return the videos of a task. Files that are named one by one count by their content, so that tasks which name
    equal ones share; the files of a directory by name, size and time, as reading them all would take long.

    Raises:
        SpecError: one is not there.
    """
    try:
        return await asyncio.to_thread(_catalogue, video, contents)
    except OSError as error:
        raise SpecError(f"video source {error.filename}: {error.strerror}") from error


def _catalogue(video: VideoTools, contents: Contents) -> Catalogue:
    if isinstance(video.source, str) and Path(video.source).is_dir():
        files = _listed(Path(video.source))
        told = [[name, *stamp_of(path)[2:]] for name, path in files.items()]
    else:
        named = {Path(video.source).name: video.source} if isinstance(video.source, str) else video.source
        files = {name: Path(path) for name, path in sorted(named.items())}
        told = [[name, contents.digest(path)] for name, path in files.items()]
        contents.save()
    return Catalogue(files, hashlib.blake2b(orjson.dumps(told), digest_size=32).hexdigest())


def _listed(folder: Path) -> dict[str, Path]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
    return {name: folder / name for name in names}
