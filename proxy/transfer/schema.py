"""The content of a bundle's parts: the manifest, and the lines of the batches (pure)."""

from collections.abc import Iterator
from typing import BinaryIO

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.transfer.format import FORMAT, BundleError, Part, read
from proxy.tree.keys import KEY_VERSION
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec

_DIGEST = r"^[0-9a-f]{64}$"
_MAX_NUMBER = 1 << 40
"""Largest number of a node, and largest count: far above any tree, and far below SQLite's 63 bits."""

_MAX_BYTES = (1 << 63) - 1
"""Most bytes that a call has used: the largest number of SQLite."""


class BundleManifest(BaseModel):
    """What a bundle states about itself; `current` if it is of the task's own environment."""

    model_config = ConfigDict(frozen=True)

    forkpoint: str = Field(max_length=100)
    format: int
    key_version: int
    task: str = Field(max_length=200)
    root_key: str = Field(pattern=r"^[0-9a-f]{32}$")
    spec: EnvironmentSpec
    current: bool = True
    nodes: int = Field(ge=1, le=_MAX_NUMBER)
    records: int = Field(ge=0, le=_MAX_NUMBER)
    snapshots: int = Field(default=0, ge=0, le=_MAX_NUMBER)
    snapshots_left_out: int = Field(default=0, ge=0, le=_MAX_NUMBER)


class NodeLine(BaseModel):
    """A node, in the order of numbers from the root's 0, with digests as hex: exact, and content or witness."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: int = Field(ge=0, le=_MAX_NUMBER)
    exact: str | None = Field(pattern=_DIGEST)
    content: str | None = Field(pattern=_DIGEST)
    pinned: bool


class RecordLine(BaseModel):
    """A recorded call.

    Attributes:
        recorded_at: When it ran, in seconds since the epoch.
        reproducible: Whether it leads to its target again.
        age_s: For how long background processes had been running (`Rollout.age_s`); None if that is not known.
        cpu_s: What the call used of the machine, as its `ResourceUse`; None if that is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: int = Field(ge=0, le=_MAX_NUMBER)
    target: int = Field(ge=0, le=_MAX_NUMBER)
    key: str = Field(pattern=_DIGEST)
    effect: int = Field(ge=0, lt=1 << len(Effect.__members__))
    seconds: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    recorded_at: float = Field(ge=0, le=1e12, allow_inf_nan=False)
    reproducible: bool
    age_s: float | None = Field(default=None, ge=0, le=1e9, allow_inf_nan=False)
    call: str = Field(pattern=_DIGEST)
    upload: str | None = Field(pattern=_DIGEST)
    answer: str = Field(pattern=_DIGEST)
    cpu_s: float | None = Field(default=None, ge=0, le=1e9, allow_inf_nan=False)
    peak_bytes: int | None = Field(default=None, ge=0, le=_MAX_BYTES)
    read_bytes: int | None = Field(default=None, ge=0, le=_MAX_BYTES)
    written_bytes: int | None = Field(default=None, ge=0, le=_MAX_BYTES)


BundleLine = NodeLine | RecordLine


def manifest_of(part: Part) -> BundleManifest:
    """Return the first part's content. Raises BundleError if it cannot be read, or its version is unknown."""
    try:
        fields = orjson.loads(part.data)
        if isinstance(fields, dict) and fields.get("format") != FORMAT:
            raise BundleError(f"its format is {fields.get('format')!r}, this Forkpoint reads {FORMAT}.")
        manifest = BundleManifest.model_validate(fields)
    except (orjson.JSONDecodeError, ValidationError) as error:
        raise BundleError(f"part {part.name} is not a manifest: {_first_fault(error)}.") from error
    if manifest.key_version != KEY_VERSION:
        raise BundleError(
            f"its calls have keys of version {manifest.key_version}, this Forkpoint makes {KEY_VERSION}: none would hit"
        )
    return manifest


def lines_of(part: Part) -> Iterator[BundleLine]:
    """Yield the lines of a batch. Raises BundleError if a line cannot be read."""
    for number, line in enumerate(part.data.split(b"\n"), 1):
        try:
            fields = orjson.loads(line)
            model = NodeLine if isinstance(fields, dict) and "node" in fields else RecordLine
            yield model.model_validate(fields)
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise BundleError(f"line {number} of {part.name} cannot be read: {_first_fault(error)}.") from error


def content(file: BinaryIO) -> Iterator[Part | BundleLine]:
    """Yield the blobs and lines of a bundle that was checked."""
    for part in read(file):
        if part.kind in ("blob", "zblob"):
            yield part
        elif part.kind == "batch":
            yield from lines_of(part)


def _first_fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"{'.'.join(str(part) for part in fault['loc'])[:100]}: {fault['msg']}"
    return str(error)
