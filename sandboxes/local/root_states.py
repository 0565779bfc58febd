"""The root states of specs: built once, waited for until the disk has them, and kept while they are used."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from sandboxes.local.layers import Layers

KEPT_S = 30 * 86_400.0
"""A root state that nobody has started from for so long gives its bytes back; what it looked like stays known."""


@dataclass(frozen=True, slots=True)
class RootState:
    """A spec's root state. born_ns: modification times before it are not those of calls.

    content: the digest of all that set-up changed; empty where nothing was set up, or too much to digest.
    """

    layers: tuple[str, ...]
    born_ns: int
    content: str = ""


class RootStates:
    """A small file for each root state that was ever built here. Methods block: run them in a thread."""

    def __init__(self, directory: Path, layers: Layers) -> None:
        self._directory, self._layers = directory, layers

    def open(self) -> None:
        """Make the directory."""
        self._directory.mkdir(exist_ok=True)

    def find(self, key: str) -> RootState | None:
        """Return what is known of a root state, and note that it is used; its layers may be gone."""
        path = self._directory / f"{key}.json"
        try:
            found = _read(path)
            path.touch()
        except (OSError, ValueError, KeyError):
            return None
        return found

    def save(self, key: str, root: RootState) -> None:
        """Keep a root state. All of a task hangs on it, so unlike other layers it outlives a loss of power."""
        self._layers.sync(root.layers)
        draft = self._directory / f"{key}.part"
        draft.write_text(json.dumps({"layers": root.layers, "born_ns": root.born_ns, "content": root.content}))
        draft.rename(self._directory / f"{key}.json")

    def in_use(self) -> set[str]:
        """Return the layers of the root states that were used lately."""
        since = time.time() - KEPT_S
        found: set[str] = set()
        for path in self._directory.glob("*.json"):
            try:
                if path.stat().st_mtime >= since:
                    found |= set(_read(path).layers)
            except (OSError, ValueError, KeyError):
                continue
        return found


def _read(path: Path) -> RootState:
    told = json.loads(path.read_bytes())
    return RootState(tuple(told["layers"]), int(told["born_ns"]), str(told["content"]))
