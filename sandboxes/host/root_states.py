"""Root states: what a spec's base, archives, files and set-up give, built once and kept while it is used.

A small JSON file stays for each, even after its layers or image are gone. Its digest tells whether a second build gives
the same state: a tree that was recorded on another state is lost.
"""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from sandboxes.errors import NotFreezableError, RootLostError, SpecError
from sandboxes.linux.files import write_whole
from sandboxes.spec import EnvironmentSpec

KEPT_S = 30 * 86_400.0
"""A root state that no sandbox started from for 30 days gives its bytes back. Its file stays."""

_RECENT_S = 3600.0
"""How long a root state counts as used without its file being touched again. It is little beside `KEPT_S`."""

_PRESENT_DIRS = ("/", "/root", "/tmp")  # noqa: S108 - a path inside the sandbox
"""Working directories that every base and image has."""

_BESIDE_FILES = {"limits", "merge", "cache", "servers", "mcp_servers", "timeouts"}
"""Parts of a spec that do not change its root state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootState:
    """The root state of a spec, as layers over its base."""

    layers: tuple[str, ...]  # The layers, topmost first; empty if the spec asks for nothing but its base.
    images: tuple[str, ...] = ()  # The ids of the images below them.
    born_ns: int  # When it was built, since 1970; older modification times are not those of calls.
    content: str = ""  # The digest of all that set-up changed; empty if nothing was set up, or too much to digest.


class RootStates:
    """The root states of one driver. All methods but `get` block, for microseconds."""

    def __init__(self, directory: Path) -> None:
        """Name the directory of the root states' files; `open` makes it."""
        self._directory = directory
        self._locks: dict[str, asyncio.Lock] = {}
        self._lookups: dict[str, tuple[float, RootState | None]] = {}

    def open(self) -> None:
        """Make the directory."""
        self._directory.mkdir(exist_ok=True)

    async def get(
        self, key: str, is_present: Callable[[RootState], Awaitable[bool]], build: Callable[[], Awaitable[RootState]]
    ) -> RootState:
        """Return a spec's root state; build it if its storage is missing. Concurrent callers share one build."""
        # `build` must be durable: all of a task depends on the root state.

        # One build for each key; other specs build meanwhile. Of a group, the first rollout builds and the
        # others wait.
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = self._recent(key)
            if known is None:
                # The file is read in a thread: the disk may be slow, and hits must not wait.
                known = await asyncio.to_thread(self._find, key)
                self._lookups[key] = time.monotonic(), known
            # Docker may have removed the image, or an administrator the layers, while the file stayed.
            if known is not None and await is_present(known):
                return known
            try:
                root = await build()
            except NotFreezableError as error:
                raise SpecError(
                    f"set-up leaves something running ({error}): end it, or start it in a call instead"
                ) from error
            # The recorded answers belong to the old content. Answers from a mixture of both would be wrong.
            if known is not None and known.content != root.content:
                raise RootLostError
            # Last: only storage that is complete gets a file.
            await asyncio.to_thread(self._save, key, root)
            self._lookups[key] = time.monotonic(), root
            return root

    def _recent(self, key: str) -> RootState | None:
        looked_up_s, root = self._lookups.get(key, (-math.inf, None))
        return root if time.monotonic() - looked_up_s < _RECENT_S else None

    def _find(self, key: str) -> RootState | None:
        path = self._directory / f"{key}.json"
        root = self._read(path)
        if root is not None:
            # The modification time is the time of the last use; `used` reads it.
            path.touch()
        return root

    def _save(self, key: str, root: RootState) -> None:
        # Durable, as the storage is: without the file, a set-up with random names would be run again after a loss of
        # power, and its state would go under the records of the old one.
        write_whole(self._directory / f"{key}.json", json.dumps(asdict(root)).encode(), sync=True)

    def used(self) -> list[RootState]:
        """Return the root states that a sandbox started from within `KEPT_S`."""
        # Wall-clock time, because file times are; a clock that is set back only keeps states longer.
        used = (path for path in self._directory.glob("*.json") if path.stat().st_mtime >= time.time() - KEPT_S)
        return [root for root in map(self._read, used) if root is not None]

    def _read(self, path: Path) -> RootState | None:
        """Return the root state in a file; None if a loss of power has damaged it: it is then built again."""
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
            # JSON has no tuples.
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            return RootState(**values)
        # Another version's members raise TypeError: such a state is built again.
        except (OSError, ValueError, TypeError, AttributeError):
            return None


def needs_setup(spec: EnvironmentSpec) -> bool:
    """Return whether a spec's root state differs from its bare base or image."""
    return bool(spec.copied_sources or spec.files or spec.setup or spec.services or spec.directory not in _PRESENT_DIRS)


def root_key(spec: EnvironmentSpec, identity: str) -> str:
    """Return the key of a spec's root state; `identity` stands for what is outside it."""
    # Sorted, so that equal specs have equal keys whatever the order of their fields.
    # Older versions had no services. Without empty ones, their root states are found again.
    absent = {name for name in ("services", "volumes", "aliases", "hostname") if not getattr(spec, name)}
    fields = orjson.dumps(spec.model_dump(exclude=_BESIDE_FILES | absent), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(fields + identity.encode(), digest_size=16).hexdigest()
