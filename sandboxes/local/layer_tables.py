"""The tables of layers (`guest.files.row_table`): each layer's changes, or in a complete table all of its state's."""

import contextlib
import itertools
import os
from collections.abc import Sequence


class LayerTables:
    """The tables of one data directory's layers. Methods block, for microseconds."""

    def __init__(self, layers: str) -> None:
        """Name the directory of the layers, with a slash at its end."""
        self._layers = layers

    def of(self, layer: str) -> bytes:
        """Return the table of a layer's rows."""
        with open(f"{self._layers}{layer}/{'table' if self.is_complete(layer) else 'rows'}", "rb") as file:  # noqa: PTH123
            return file.read()

    def is_complete(self, layer: str) -> bool:
        """Return whether a layer's table has all rows of its state."""
        return os.path.exists(f"{self._layers}{layer}/table")  # noqa: PTH110

    def of_state(self, ids: Sequence[str]) -> tuple[bytes, int]:
        """Return what a supervisor needs to know the rows of a state, given its layers above the root state."""
        # The tables are those above the last complete one, one after another, and a descriptor of that one, or of an
        # empty file.
        above = list(itertools.takewhile(lambda layer: not self.is_complete(layer), ids))
        return b"".join(map(self.of, above)), self.open_complete(ids[len(above) :])

    def open_complete(self, ids: Sequence[str]) -> int:
        """Return a descriptor of the complete table of the first of the layers; of an empty file if it has none."""
        with contextlib.suppress(FileNotFoundError):
            if ids:
                return os.open(f"{self._layers}{ids[0]}/table", os.O_RDONLY | os.O_CLOEXEC)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
