"""Export and import of frozen states of the `local` driver, with their layers as tars; see `sandboxes.portability`.

An imported file is taken for hostile. Its digest must be the expected one, and an unpacked layer is packed again
without contents and must give the same bytes: nothing was misread, and no attribute lost here. Contents are hashed as
they are written, and checked when they are read again (`layer_check`).
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from sandboxes.driver import FrozenState
from sandboxes.guest.files import delta, row_table
from sandboxes.host import layer_tar
from sandboxes.ipc.state_messages import Links
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.files import remove_tree
from sandboxes.local.layer_check import fault_of
from sandboxes.local.layers import LayerMeta, Layers, Upper, read_manifest
from sandboxes.open_sandboxes import Holding
from sandboxes.portability import NotPortableError

_FIELDS = {"layers", "root_layers", "born_ns", "base", "sessions", "pristine"}


class LayerPorter:
    """A `Porter` of local states, whose parts are layers."""

    def __init__(self, layers: Layers, holding: Holding) -> None:
        self._layers, self._holding = layers, holding

    def carries(self, kind: str) -> bool:
        """Return whether states of a kind are plain data: images of live processes fit only their machine's kernel."""
        return kind == "files"

    def pack(self, part: str) -> Iterator[bytes]:
        """Yield a layer's canonical tar, in pieces. Raises OSError before the first one if the layer is damaged."""
        # Elsewhere it would be intact: it is checked there by what is read here.
        if part not in self._layers.intact and (fault := fault_of(self._layers.frozen / part)):
            raise OSError(f"layer {part} is damaged: {fault}")
        yield from layer_tar.pack(self._layers.frozen / part, self._layers.tables.of(part))

    @contextmanager
    def unpacking(self) -> "Iterator[LayerUnpacking]":
        """Import parts and states; nothing collects the parts before the end of the context."""
        # Imported layers are in no record and no stack until the import ends, so they are held by name.
        with contextlib.ExitStack() as held:
            yield LayerUnpacking(self._layers, lambda layer: held.enter_context(self._holding((layer,))))


class LayerUnpacking:
    """One import. Layers get new names, because another layer may have the old name here."""

    def __init__(self, layers: Layers, hold: Callable[[str], None]) -> None:
        """Start with no parts. `hold` keeps a layer from being collected until the import ends."""
        self._layers, self._hold = layers, hold
        self._names: dict[str, str] = {}
        self._counted: set[str] = set()

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """Write one layer. If the process is killed meanwhile, the next start removes it like any other upper."""
        # An upper, not a layer: until `freeze` renames it, a killed process leaves what `Layers.open` removes.
        upper = self._layers.allocate()
        try:
            meta, table = self._unpacked(upper, data, sha256)
        except BaseException:
            remove_tree(upper.path)
            raise
        # Held before it exists as a layer: a collection may run in between.
        self._hold(upper.id)
        self._names[name] = self._layers.freeze(upper, meta, table)

    def _unpacked(self, upper: Upper, data: BinaryIO, sha256: str) -> tuple[LayerMeta, bytes]:
        unpacked = layer_tar.unpack(data, upper.path)
        table = unpacked.head
        try:
            row_table.check(table)
        except row_table.MalformedTableError as error:
            raise NotPortableError(f"its table of rows cannot be read: {error}") from error
        # Packed again it must give the same bytes; see the docstring of the module.
        if unpacked.sha256 != sha256 or unpacked.outline != layer_tar.outline(upper.path, table):
            raise NotPortableError(
                "written here, its digest is another: the tar is not canonical, or this file system lost attributes"
            )
        with Opened(os.open(upper.path / "diff", os.O_RDONLY | os.O_DIRECTORY)) as folder:
            # Measured here, not taken from the file: budgets count it.
            manifest = read_manifest(upper.path, contents=True, known=unpacked.contents)
            return LayerMeta(delta.size_bytes(folder), manifest, _links(upper.path, unpacked.links)), table

    def state(self, frozen: FrozenState) -> FrozenState:
        """Return a state with the new names of its layers."""
        payload = frozen.payload
        # The payload comes from elsewhere. A member too many could change what a restore does, so the set must be
        # exact.
        if set(payload) != _FIELDS or not _plain(payload) or tuple(payload["layers"]) != frozen.parts:
            raise NotPortableError("its payload does not have the members of a local state")
        if missing := [layer for layer in frozen.parts if layer not in self._names]:
            raise NotPortableError(f"its part {missing[0]} was not imported")
        # Every name in the state is replaced, so a file from elsewhere cannot refer to a layer of this machine.
        layers = tuple(self._names[layer] for layer in frozen.parts)
        # States share most of their layers; a layer's bytes count for the first state that has it.
        size = sum(map(self._layers.size_bytes, set(layers) - self._counted))
        self._counted.update(layers)
        return replace(frozen, payload={**payload, "layers": list(layers)}, parts=layers, size_bytes=size)


def _links(folder: Path, links: Mapping[str, str]) -> Links:
    regular = all(stat.S_ISREG((folder / path).lstat().st_mode) for path in links)
    return ("regular" if regular else "other") if links else ""


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
