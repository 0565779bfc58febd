"""Checks of layers: one that changed on disk since it was frozen is no part of a state any more.

A layer that this process did not freeze is read whole at its first use: a damaged byte shows only in the content, and a
wrong state is worse than a slow restore. Large layers are read in a process of their own, because thousands of small
files would keep the proxy's interpreter busy while hits wait.
"""

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sandboxes.local.layers import Layers, read_manifest
from sandboxes.rights import held

_log = logging.getLogger(__name__)

_IN_THREAD_BYTES = 4 << 20
"""Layers up to this size are read in a thread, in some 30 ms at most. A process of its own takes 100 ms to start."""


class LayerCheck:
    """Checks the layers of one data directory."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        # One check at a time: they compete for one disk, and two restores of one state need one check.
        self._checking = asyncio.Lock()

    async def damaged(self, ids: Sequence[str]) -> list[str]:
        """Return the layers that are not as they were frozen. They are missing from now on."""
        return [layer for layer in ids if layer not in self._layers.intact and not await self._is_intact(layer)]

    async def _is_intact(self, layer: str) -> bool:
        async with self._checking:
            if layer in self._layers.intact:
                return True
            fault = await self._fault(layer)
            if fault:
                _log.error("layer %s is damaged, and its states are rebuilt by replay: %s", layer, fault)
                self._layers.disown([layer])
                return False
            self._layers.intact.add(layer)
            return True

    async def _fault(self, layer: str) -> str:
        look = fault_of if self._layers.size_bytes(layer) <= _IN_THREAD_BYTES else _fault_by_process
        return await asyncio.to_thread(look, self._layers.frozen / layer)


def fault_of(layer: Path) -> str:
    """Return what is wrong with the layer in a directory; empty if nothing is. Blocking."""
    try:
        stored = json.loads((layer / "meta.json").read_bytes())
        name = "table" if (layer / "table").exists() else "rows"
        if hashlib.sha256((layer / name).read_bytes()).hexdigest() != stored["rows"]:
            return "its table of rows was changed"
        manifest = read_manifest(layer, contents=True)
        if manifest.stats.hex() != stored["stats"]:
            return "files were added, removed or changed"
        return "" if manifest.contents.hex() == stored["contents"] else "the content of a file was changed"
    except PermissionError:
        # An ordinary user cannot read what a sandbox, as root of its namespace, has forbidden to everybody.
        return "it cannot be read" if held.over_files() else ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it cannot be read: {error}"


def _fault_by_process(layer: Path) -> str:
    program = [sys.executable, "-m", "sandboxes.local.layer_check", str(layer)]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603 - our own program
    # Without an answer nothing is known of the layer, and what is not known to be intact is not used.
    return (done.stderr[-200:] if done.returncode else done.stdout).decode(errors="replace").strip()


if __name__ == "__main__":
    print(fault_of(Path(sys.argv[1])))
