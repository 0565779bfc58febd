"""Removal of directories in the background, many of them in one thread."""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from sandboxes.linux.files import remove_tree
from sandboxes.task_owner import TaskOwner

_GATHER_S = 0.5
"""How long directories are gathered before one thread removes them. Each call that writes leaves one directory of
overlayfs behind. A thread costs 0.3 ms of CPU, and removing such a directory 0.02 ms. Halved, the proxy wakes a thread
twice as often; doubled, the disk space of closed sandboxes comes back so much later."""


_AGAIN_S = (1.0, 10.0, 60.0)
"""Pauses before each further try to remove what could not be removed, for example without free descriptors. Trouble of
the machine mostly ends within seconds. After the last try a directory stays until the proxy ends."""


class Reaper:
    """Removes directories in the background."""

    def __init__(self, background: TaskOwner) -> None:
        """Remove nothing yet. A wait for the background lasts until everything is removed."""
        self._background = background
        self._paths: list[Path | str] = []
        # What no try has removed. `close` tries a last time, and so does the next `Layers.open`.
        self._stuck: list[Path | str] = []
        self._removing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def remove(self, paths: Iterable[Path | str]) -> None:
        """Remove directories and everything in them soon."""
        self._paths += paths
        if self._paths and (self._removing is None or self._removing.done()):
            self._removing = self._background.spawn("remove directories", self._remove())

    def retry(self, paths: Sequence[Path | str]) -> None:
        """Remove directories that could not be removed a moment ago, after pauses."""
        if paths:
            self._background.spawn("remove directories again", self._retry(paths))

    def close(self) -> None:
        """Remove from now on without waiting for more. What stays even now is removed by the next `Layers.open`."""
        self._closing.set()
        stuck, self._stuck = self._stuck, []
        self.remove(stuck)

    async def _remove(self) -> None:
        await self._pause(_GATHER_S)
        # More may come while the thread works.
        while self._paths:
            paths, self._paths = self._paths, []
            self.retry(await asyncio.to_thread(_remove_all, paths))

    async def _retry(self, paths: Sequence[Path | str]) -> None:
        for pause_s in _AGAIN_S:
            await self._pause(pause_s)
            paths = await asyncio.to_thread(_remove_all, paths)
            if not paths or self._closing.is_set():
                return
        self._stuck += paths

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()


def _remove_all(paths: Sequence[Path | str]) -> list[Path | str]:
    return [path for path in paths if not (_remove_work(f"{path}/") or remove_tree(Path(path)))]


def _remove_work(folder: str) -> bool:
    """Remove a `work` directory if it has what a volatile mount of overlayfs leaves there, and nothing else."""
    # Nearly all have. Five system calls take a third of the CPU of a walk, which may find anything.
    try:
        os.unlink(f"{folder}work/incompat/volatile/dirty")  # noqa: PTH108 - putting a `Path` together takes 5 us
        for inner in ("work/incompat/volatile", "work/incompat", "work", ""):
            os.rmdir(folder + inner)  # noqa: PTH106
    except OSError:
        return False
    return True
