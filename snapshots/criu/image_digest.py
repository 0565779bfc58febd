"""Digests of the images of a checkpoint, and of what is noted beside them, so that damaged ones are never restored."""

from hashlib import blake2b
from pathlib import Path

import orjson

_NAME = "digests.json"
NOTED = "noted.json"
"""The file with the times and settings that a restore puts back; see `ipc.launch_messages.NamesInspected`."""
_CHUNK_BYTES = 1 << 20


def seal(images: Path) -> None:
    """Write the digests of all images and of what is noted beside them. Blocking."""
    # Not all files: a restore writes its log and its statistics into the same directory.
    digests = {path.name: _digest(path) for path in sorted((*images.glob("*.img"), images / NOTED))}
    (images / _NAME).write_bytes(orjson.dumps(digests))


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
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
