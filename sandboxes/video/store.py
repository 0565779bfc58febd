"""The store of videos and of what was made from them.

A part is a directory below `parts` (`sandboxes.workers.parts`), named by a digest of what its content follows from.
`v-…` is a video with its properties, `m-…` are measurements, `d-…` are a model's captions. A part is written below
`work` and then renamed.
"""

import hashlib
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import override

from sandboxes.errors import StateGoneError
from sandboxes.linux.files import file_digest, sync_path
from sandboxes.workers.parts import MANIFEST, PartStore

VIDEO, INFO = "video", "info.json"


def part_name(kind: str, *sources: Any) -> str:
    """Return the name of a part: its kind, and a digest of everything that its content follows from."""
    digest = hashlib.blake2b(orjson.dumps(sources, option=orjson.OPT_SORT_KEYS), digest_size=20)
    return f"{kind}-{digest.hexdigest()}"


class VideoStore(PartStore):
    """The directories of one store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "parts", "part of a video")
        self.folder, self._work = folder, folder / "work"
        self._adopting = threading.Lock()

    @override
    def open(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        for folder in (self._work, self.folder / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        super().open()

    def new(self) -> Path:
        """Return a new directory in which a part can be written."""
        folder = self._work / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder

    def path(self, part: str) -> Path:
        """Return the directory of a part."""
        return self.parts / part

    @override
    def has(self, part: str) -> bool:
        # Its files have the sizes that were written, too.
        try:
            sizes = self._sizes(part)
            return all((self.parts / part / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

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
        (folder / MANIFEST).write_bytes(orjson.dumps({"sizes": sizes, "digests": digests}))
        sync_path(folder / MANIFEST)
        sync_path(folder)
        with self._adopting:
            if self.has(part):
                shutil.rmtree(folder)
                return
            self.drop([part])
            folder.rename(self.parts / part)
            self.intact.add(part)

    def discard(self, folder: Path) -> None:
        """Delete a directory of `new`, unless it became a part."""
        shutil.rmtree(folder, ignore_errors=True)

    def size_bytes(self, part: str) -> int:
        """Return the size of a part; 0 if it is missing."""
        try:
            return sum(self._sizes(part).values())
        except (OSError, ValueError):
            return 0

    def info(self, part: str) -> dict[str, Any]:
        """Return the properties of a video, from `probe`."""
        info: dict[str, Any] = orjson.loads((self.parts / part / INFO).read_bytes())
        return info

    def _sizes(self, part: str) -> dict[str, int]:
        sizes: dict[str, int] = self.manifest(part)["sizes"]
        return sizes

    @override
    def manifest(self, part: str) -> dict[str, Any]:
        manifest: Any = super().manifest(part)
        # One of an earlier version has no digests.
        if not isinstance(manifest, dict) or set(manifest) != {"sizes", "digests"}:
            raise ValueError("the manifest of a part has other members")
        return manifest
