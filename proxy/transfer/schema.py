"""What stands in the parts of a bundle: its manifest, and the lines of its batches (pure)."""

from collections.abc import Iterator
from typing import BinaryIO

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.transfer.format import FORMAT, BundleError, Part, read
from proxy.tree.keys import KEY_VERSION
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec

_DIGEST = r"^[0-9a-f]{64}$"
_MOST = 1 << 40


class Manifest(BaseModel):
    """What a bundle says of itself. current: whether it was the tree of its task's spec, or of another environment.

    snapshots: kept states in it, at most; left out: those that cannot travel.
    """

    model_config = ConfigDict(frozen=True)

    forkpoint: str = Field(max_length=100)
    format: int
    key_version: int
    task: str = Field(max_length=200)
    root_key: str = Field(pattern=r"^[0-9a-f]{32}$")
    spec: EnvironmentSpec
    current: bool = True
    nodes: int = Field(ge=1, le=_MOST)
    records: int = Field(ge=0, le=_MOST)
    snapshots: int = Field(default=0, ge=0, le=_MOST)
    snapshots_left_out: int = Field(default=0, ge=0, le=_MOST)


class NodeLine(BaseModel):
    """A state. node: its number, from 0 for the root; they come in order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: int = Field(ge=0, le=_MOST)
    exact: str | None = Field(pattern=_DIGEST)
    content: str | None = Field(pattern=_DIGEST)
    pinned: bool


class RecordLine(BaseModel):
    """A recorded call, by the numbers of its nodes and the digests of its blobs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: int = Field(ge=0, le=_MOST)
    target: int = Field(ge=0, le=_MOST)
    key: str = Field(pattern=_DIGEST)
    effect: int = Field(ge=0, lt=1 << len(Effect.__members__))
    seconds: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    recorded_at: float = Field(ge=0, le=1e12, allow_inf_nan=False)
    reproducible: bool
    call: str = Field(pattern=_DIGEST)
    upload: str | None = Field(pattern=_DIGEST)
    answer: str = Field(pattern=_DIGEST)


BundleLine = NodeLine | RecordLine


def manifest_of(part: Part) -> Manifest:
    """Return what the first part says.

    Raises:
        BundleError: it says nothing that can be read, or names a version that is not known here.
    """
    try:
        told = orjson.loads(part.data)
        if isinstance(told, dict) and told.get("format") != FORMAT:
            raise BundleError(f"its format is {told.get('format')!r}, this Forkpoint reads {FORMAT}.")
        manifest = Manifest.model_validate(told)
    except (orjson.JSONDecodeError, ValidationError) as error:
        raise BundleError(f"part {part.name} is no manifest: {_first(error)}.") from error
    if manifest.key_version != KEY_VERSION:
        raise BundleError(
            f"its calls have keys of version {manifest.key_version}, this Forkpoint makes {KEY_VERSION}: none would hit"
        )
    return manifest


def lines_of(part: Part) -> Iterator[BundleLine]:
    """Yield the lines of a batch.

    Raises:
        BundleError: one cannot be read.
    """
    for number, line in enumerate(part.data.split(b"\n"), 1):
        try:
            told = orjson.loads(line)
            kind = NodeLine if isinstance(told, dict) and "node" in told else RecordLine
            yield kind.model_validate(told)
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise BundleError(f"line {number} of {part.name} cannot be read: {_first(error)}.") from error


def content(file: BinaryIO) -> Iterator[Part | BundleLine]:
    """Yield the blobs and lines of a bundle that was checked."""
    for part in read(file):
        if part.kind in ("blob", "zblob"):
            yield part
        elif part.kind == "batch":
            yield from lines_of(part)


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"{'.'.join(str(part) for part in fault['loc'])[:100]}: {fault['msg']}"
    return str(error)
