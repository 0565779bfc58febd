"""What the store holds of a state: a manifest, and chunks of its units (pure).

Every object is named by the SHA-256 of its bytes, below the view of the owner that wrote it. The log of the task names
the manifest, the manifest names the chunks, and each digest is compared when an object is read. So the store can lose
or damage a state, but cannot give another one.

Manifests hold what agents wrote, and the store may be open to others. So names, sizes and counts are checked when a
manifest is read, and the driver checks the units as those of an imported file.
"""

import re
from hashlib import sha256
from itertools import chain

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from proxy.transfer.state_records import StateLine

CHUNK_BYTES = 4 << 20
"""Size of a chunk in bytes; the last one of a unit is smaller. Stores charge for each request."""
MAX_MANIFEST_BYTES = 16 << 20
"""Largest manifest in bytes: 100,000 chunks are 400 GB, far more than a state may have."""
_NAME = r"^[0-9]{1,19}/[0-9a-f]{64}$"


class ManifestError(ValueError):
    """An object is not what a member wrote under its name."""


class ChunkRef(BaseModel):
    """A chunk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=_NAME)  # Name of its object, relative to the task's objects.
    size_bytes: int = Field(gt=0, le=CHUNK_BYTES)


class StateManifest(BaseModel):
    """A state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # As in an exported file. Its node is the number in the store, which is the same on all members.
    state: StateLine
    chunks: tuple[tuple[ChunkRef, ...], ...]  # The chunks of each unit of the state, in order.

    @model_validator(mode="after")
    def _adds_up(self) -> "StateManifest":
        if len(self.chunks) != len(self.state.units):
            raise ValueError("units and chunks differ in number")
        for unit, chunks in zip(self.state.units, self.chunks, strict=True):
            if unit.size_bytes != sum(chunk.size_bytes for chunk in chunks):
                raise ValueError("a unit is not as large as its chunks")
        if len({unit.name for unit in self.state.units}) != len(self.state.units):
            raise ValueError("a unit is named twice")
        return self

    @property
    def names(self) -> frozenset[str]:
        """Names of the chunks."""
        return frozenset(chunk.name for chunk in chain(*self.chunks))

    def packed(self) -> bytes:
        """Return the manifest as bytes."""
        return self.model_dump_json().encode()

    @property
    def size_bytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.size_bytes for unit in self.state.units)


def folder_of(task: str) -> str:
    """Return the common prefix of the objects of a task, without a slash at its end. A task may have any name."""
    return f"states/{sha256(task.encode()).hexdigest()[:32]}"


def name_of(view: int, data: bytes) -> str:
    """Return the name of an object that the owner of a view writes, relative to the task's objects."""
    return f"{view}/{sha256(data).hexdigest()}"


def is_name(name: str) -> bool:
    """Return whether a name is one that `name_of` returns."""
    return re.fullmatch(_NAME, name, re.ASCII) is not None


def require_intact(name: str, data: bytes) -> None:
    """Check that an object has the bytes that it was written with. Raises ManifestError: it has others."""
    if sha256(data).hexdigest() != name.partition("/")[2]:
        raise ManifestError(f"the object {name} is not what was written")


def decode(name: str, data: bytes, node: int) -> StateManifest:
    """Return a manifest. Raises ManifestError: the object is damaged, or is no manifest of this node."""
    require_intact(name, data)
    try:
        manifest = StateManifest.model_validate_json(data)
    except ValidationError as error:
        raise ManifestError(f"the object {name} is not a manifest: {error.errors()[0]['msg']}") from error
    if manifest.state.node != node:
        raise ManifestError(f"the object {name} is the state of another node")
    return manifest
