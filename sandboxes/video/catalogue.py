"""The videos that a task's `load_video` knows, and the contents of their files."""

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
from sandboxes.linux.files import write_whole
from sandboxes.linux.plain_paths import open_plain
from sandboxes.sources import SourceRules
from sandboxes.video.messages import VideoError
from sandboxes.video_spec import VideoTools

_CHUNK = 1 << 20
FileStamp = tuple[int, int, int, int]
"""Device, inode, size and modification time of a file. A file with an equal stamp has not changed."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The videos of a task, by name; `identity` is a digest of their contents."""

    files: dict[str, Path]
    identity: str


class Contents:
    """Remembers the SHA-256 of files for as long as they do not change."""

    def __init__(self, path: Path, rules: SourceRules) -> None:
        self._path, self.rules = path, rules
        self._known: dict[str, tuple[FileStamp, str]] = {}
        self._saving = threading.Lock()
        self._unsaved = False

    def open(self) -> None:
        """Read the digests that earlier instances have saved."""
        with contextlib.suppress(OSError, ValueError):
            entries = orjson.loads(self._path.read_bytes())
            self._known = {path: (tuple(stamp), digest) for path, stamp, digest in entries}

    def known(self, path: Path) -> str | None:
        """Return a file's digest if it is known and the file has not changed since; None otherwise."""
        entry = self._known.get(str(path))
        return entry[1] if entry is not None and entry[0] == stamp_of(path) else None

    def learn(self, path: Path, stamp: FileStamp, digest: str) -> None:
        """Remember the digest that a file had with a stamp."""
        self._known[str(path)] = stamp, digest
        self._unsaved = True

    def save(self) -> None:
        """Save the digests that were learnt since the last save."""
        with self._saving:
            if self._unsaved:
                self._unsaved = False
                write_whole(self._path, orjson.dumps([[path, *known] for path, known in list(self._known.items())]))

    def digest(self, path: Path, *, confined: bool) -> str:
        """Return a file's digest; read the file if the digest is not known. A confined path must be allowed."""
        known = self.known(path)
        if known is None:
            stamp = stamp_of(path)
            known = self._read(path, lambda _: None, confined=confined)
            if stamp == stamp_of(path):
                self.learn(path, stamp, known)
        return known

    def copy(self, path: Path, target: Path, max_bytes: int, *, confined: bool) -> str:
        """Copy a file and return the digest of the copy; VideoError (`limit`) if it is larger than `max_bytes`."""
        stamp = stamp_of(path)
        if stamp[2] > max_bytes:
            raise VideoError(
                "limit",
                f"this file has {stamp[2] >> 20} MB, and this task takes up to {max_bytes >> 20} MB (limits.disk_mb)",
            )
        with target.open("wb") as out:
            digest = self._read(path, out.write, confined=confined)
        if stamp == stamp_of(path):
            self.learn(path, stamp, digest)
            self.save()
        return digest

    def _read(self, path: Path, write: Callable[[bytes], object], *, confined: bool) -> str:
        digest = hashlib.sha256()
        # The path may lead elsewhere than when the spec was checked.
        with open_plain(self.rules.real(path, confined=confined)) as plain, plain.open("rb") as file:
            while data := file.read(_CHUNK):
                digest.update(data)
                write(data)
        return digest.hexdigest()


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


async def catalogue_of(video: VideoTools, contents: Contents, *, confined: bool) -> Catalogue:
    """Return the videos of a task."""
    # Files that are named one by one count by their content, so that tasks with equal videos share a tree; a
    # directory's count by name, size and time, because reading all would take long.
    try:
        return await asyncio.to_thread(_catalogue, video, contents, confined=confined)
    except OSError as error:
        raise SpecError(f"video source {error.filename}: {error.strerror}") from error


def _catalogue(video: VideoTools, contents: Contents, *, confined: bool) -> Catalogue:
    if isinstance(video.source, str) and Path(video.source).is_dir():
        folder = Path(contents.rules.real(video.source, confined=confined))
        files = _listed(folder)
        for path in files.values():
            # Other entries of an allowed directory need no look of their own.
            if path.is_symlink():
                contents.rules.real(path, confined=confined)
        entries = [[name, *stamp_of(path)[2:]] for name, path in files.items()]
    else:
        named = {Path(video.source).name: video.source} if isinstance(video.source, str) else video.source
        files = {name: Path(path) for name, path in sorted(named.items())}
        for path in files.values():
            contents.rules.real(path, confined=confined)
        entries = [[name, contents.digest(path, confined=confined)] for name, path in files.items()]
        contents.save()
    return Catalogue(files, hashlib.blake2b(orjson.dumps(entries), digest_size=32).hexdigest())


def _listed(folder: Path) -> dict[str, Path]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
    return {name: folder / name for name in names}
