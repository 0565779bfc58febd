"""Digests of the images of a checkpoint, and of what is noted beside them, so that damaged ones are never restored."""

import os
from hashlib import blake2b
from pathlib import Path

import orjson

_NAME = "digests.json"
NOTED = "noted.json"
"""The file with the times and settings that a restore puts back; see `ipc.launch_messages.NamesInspected`."""
_CHUNK_BYTES = 1 << 20
_known: dict[tuple[int, int, int, int], str] = {}
"""Digests of files that this process has read, by device, inode, time of modification and size. Images of a parent are
linked into many checkpoints, and each takes a second for a gigabyte."""
_MOST_KNOWN = 1 << 16


def seal(images: Path) -> None:
    """Write the digests of all images, those of parents too, and of what is noted beside them. Blocking."""
    # Not all files: a restore writes its log and its statistics into the same directory.
    paths = sorted((*images.rglob("*.img"), images / NOTED))
    (images / _NAME).write_bytes(orjson.dumps({str(path.relative_to(images)): _digest(path) for path in paths}))


def is_whole(images: Path) -> bool:
    """Return whether the images are as they were sealed. Blocking."""
    try:
        digests: dict[str, str] = orjson.loads((images / _NAME).read_bytes())
        return bool(digests) and all(_digest(images / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        name = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if (known := _known.get(name)) is not None:
            return known
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    return _known.setdefault(name, digest.hexdigest())
