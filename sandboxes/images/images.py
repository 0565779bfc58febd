"""The images of a driver: what their names stand for, and the states that become images."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandboxes.errors import SandboxError
from sandboxes.images import state_image
from sandboxes.images.config import ImageConfig
from sandboxes.images.store import ImageStore
from sandboxes.portability import NoImageError
from sandboxes.rights import held
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec


class Images:
    """Answers what clients ask about images, and makes images of states."""

    def __init__(self, store: ImageStore, sources: SourceRules, folder: Path) -> None:
        self._store, self._sources, self._folder = store, sources, folder
        # One at a time, because each needs room on the disk.
        self.making = asyncio.Lock()

    async def config(self, image: str) -> dict[str, Any]:
        """Return the ID and the configuration of an image, in Docker's words; `SpecError` if there is none to use."""
        return await asyncio.to_thread(self._config, image)

    def _config(self, image: str) -> dict[str, Any]:
        name = self._sources.real(image, confined=False) if image.startswith("/") else image
        id_, config = self._store.describe(name)
        return {"Id": id_, **config.members()}

    async def tags(self) -> list[str]:
        """Return the names of all images of Docker's; none without a daemon."""
        try:
            return await asyncio.to_thread(self._store.daemon.tags)
        except SandboxError:
            return []

    @staticmethod
    def require_possible(spec: EnvironmentSpec) -> None:
        """Raise `NoImageError` for a spec whose states cannot be images."""
        if spec.image is None and spec.base == "host":
            raise NoImageError("its base is this machine itself, which no image may contain. Use an image as its base.")
        if not held.over_files():
            raise NoImageError(
                "the proxy does not see the owners of files, because it has no rights over those of other users. "
                "Run it as root, or beside a launcher that is root (docs/deploying.md)."
            )

    async def make(
        self, lowers: Sequence[str], config: ImageConfig, left_out: Sequence[str], name: str, target: Path | None
    ) -> str:
        """Make an image of directories, the topmost first; see `state_image.ImageOrder`."""
        alone = [self._store.empty] if len(lowers) == 1 else []
        order = state_image.ImageOrder(
            lowers=[*lowers, *alone], empty=bool(alone), config=config.members(), left_out=left_out, name=name,
            target=None if target is None else str(target), folder=str(self._folder),
        )  # fmt: skip
        return await state_image.make(order)
