"""The root states of specs: images that set-up has made, noted in a small file each, and kept while they are used."""

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

KEPT_S = 30 * 86_400.0
"""A root state that nobody has started from for so long gives its image back; what it looked like stays known."""


@dataclass(frozen=True, slots=True)
class RootImage:
    """A spec's root state. born_ns: modification times before it are not those of calls.

    content: the digest of all that set-up changed; empty where nothing was set up, or too much to digest.
    """

    image: str
    born_ns: int
    content: str = ""


class RootImages:
    """Methods block, for microseconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        self._folder.mkdir(exist_ok=True)

    def find(self, key: str) -> RootImage | None:
        """Return what is known of a root state, and note that it is used; its image may be gone."""
        path = self._folder / f"{key}.json"
        try:
            found = RootImage(**json.loads(path.read_bytes()))
            path.touch()
        except (OSError, ValueError, TypeError):
            return None
        return found

    def save(self, key: str, root: RootImage) -> None:
        """Keep a root state."""
        draft = self._folder / f"{key}.part"
        draft.write_text(json.dumps(asdict(root)))
        draft.rename(self._folder / f"{key}.json")

    def images(self) -> set[str]:
        """Return the images of all root states that are known."""
        return _images(self._folder.glob("*.json"))

    def unused(self) -> set[str]:
        """Return the images that nobody has started from lately."""
        since = time.time() - KEPT_S
        return _images(path for path in self._folder.glob("*.json") if path.stat().st_mtime < since)


def _images(notes: Iterable[Path]) -> set[str]:
    found = set()
    for note in notes:
        # One that a loss of power has damaged tells nothing; its root state is built again.
        with contextlib.suppress(ValueError, TypeError):
            found.add(RootImage(**json.loads(note.read_bytes())).image)
    return found
