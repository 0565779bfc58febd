"""Frozen states of the `local` driver, out and in: their layers as tars. See `sandboxes.porting`."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, BinaryIO

from sandboxes.driver import FrozenState
from sandboxes.guest import file_delta as delta
from sandboxes.linux.files import remove_tree
from sandboxes.local import layer_tar
from sandboxes.local.layers import Layers, Upper
from sandboxes.portability import NotPortableError

Holding = Callable[[tuple[str, ...]], AbstractContextManager[None]]
_FIELDS = {"layers", "root_layers", "born_ns", "base", "sessions", "pristine"}


class LayerPorter:
    """A `Porter`. holding: keeps layers from being collected."""

    def __init__(self, layers: Layers, holding: Holding) -> None:
        self._layers, self._holding = layers, holding

    def carries(self, kind: str) -> bool:
        """See `Porter.carries`."""
        return kind == "files"

    def pack(self, part: str) -> Iterator[bytes]:
        """See `Porter.pack`."""
        return layer_tar.pack(self._layers.frozen / part, self._layers.meta(part))

    @contextmanager
    def unpacking(self) -> "Iterator[LayerUnpacking]":
        """See `Porter.unpacking`."""
        with contextlib.ExitStack() as held:
            yield LayerUnpacking(self._layers, lambda layer: held.enter_context(self._holding((layer,))))


class LayerUnpacking:
    """An `Unpacking`. Layers get fresh names: one under its old name may be here already, and another one."""

    def __init__(self, layers: Layers, hold: Callable[[str], None]) -> None:
        self._layers, self._hold = layers, hold
        self._names: dict[str, str] = {}
        self._counted: set[str] = set()

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """See `Unpacking.part`. What is half written is swept at start, as other uppers are."""
        upper = self._layers.allocate()
        try:
            meta = self._unpacked(upper, data, sha256)
        except BaseException:
            remove_tree(upper.path)
            raise
        self._hold(upper.id)
        self._names[name] = self._layers.freeze(upper, meta)

    def _unpacked(self, upper: Upper, data: BinaryIO, sha256: str) -> dict[str, Any]:
        meta = layer_tar.unpack(data, upper.path)
        # Packed again, it must be what it was: then nothing was misread, and this file system lost nothing.
        digest = hashlib.sha256()
        for piece in layer_tar.pack(upper.path, meta):
            digest.update(piece)
        if digest.hexdigest() != sha256:
            raise NotPortableError(
                "written here, its digest is another: it is no canonical tar, or its attributes were lost"
            )
        folder = os.open(upper.path / "diff", os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Not what the file says: budgets count it.
            return {**meta, "size_bytes": delta.size_bytes(folder)}
        finally:
            os.close(folder)

    def state(self, frozen: FrozenState) -> FrozenState:
        """See `Unpacking.state`."""
        payload = frozen.payload
        if set(payload) != _FIELDS or not _plain(payload) or tuple(payload["layers"]) != frozen.parts:
            raise NotPortableError("its payload is none of this driver's")
        if missing := [layer for layer in frozen.parts if layer not in self._names]:
            raise NotPortableError(f"its part {missing[0]} is not there")
        layers = tuple(self._names[layer] for layer in frozen.parts)
        # Most layers are shared: the first state that needs one is said to have added it.
        size = sum(map(self._layers.size_bytes, set(layers) - self._counted))
        self._counted.update(layers)
        return replace(frozen, payload={**payload, "layers": list(layers)}, parts=layers, size_bytes=size)


def _plain(payload: dict[str, Any]) -> bool:
    layers, above = payload["layers"], payload["root_layers"]
    return (
        isinstance(layers, list)
        and all(isinstance(layer, str) for layer in layers)
        and type(above) is int
        and 0 <= above <= len(layers)
        and type(payload["born_ns"]) is int
        and isinstance(payload["base"], str)
        and isinstance(payload["sessions"], dict)
        and isinstance(payload["pristine"], dict | None)
    )
