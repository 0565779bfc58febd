"""The file that a tree travels in: a tar whose members name their own digests, and whose last member seals them (pure).

    manifest/00000000-<digest>   versions, spec, root key, counts
    blob, zblob/…-<digest>       a call or an answer, plain or compressed; the digest is that of the plain bytes
    batch/…-<digest>             nodes and records, one JSON line each; a line names only what came before it
    part, chunk, snapshot/…      snapshots, if they were requested: units in pieces, then the states that need them
    seal/…-<digest>              the number of parts, and the digest of every byte before

Any tar program can unpack the file. The reader here is stricter: each header must be, bit by bit, the one that the
writer makes, and padding must be zeros. One flipped bit anywhere is therefore detected, and the error names the part.
"""

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO, Literal, get_args

import orjson

FORMAT = 1
"""Version of the file format. It is raised when an older reader would misread a newer file."""
BLOCK = 512
"""Size of a tar block in bytes: headers take one, and contents are padded to whole ones."""
MAX_PART_BYTES = 1 << 29
"""Largest part in bytes, packed or unpacked. No answer is as large; the limit keeps a false file from taking memory."""
CHUNK_BYTES = 1 << 20
"""Size of the pieces in which a unit travels: the reader holds one in memory."""
EntryKind = Literal["manifest", "blob", "zblob", "batch", "snapshot", "part", "chunk", "seal"]
_KINDS = frozenset(get_args(EntryKind))
_END = bytes(2 * BLOCK)


class BundleError(ValueError):
    """A file is no bundle, or is damaged; the text names the part that is wrong."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bundle."""

    kind: EntryKind
    name: str  # In the tar.
    data: bytes  # What it holds, unpacked.
    digest: bytes  # BLAKE2b-256 of data.
    stored: bytes  # The bytes as they are in the file.


def digest_of(data: bytes) -> bytes:
    """Return the BLAKE2b-256 digest of data."""
    return blake2b(data, digest_size=32).digest()


class Writer:
    """Makes the bytes of a bundle, part by part."""

    def __init__(self) -> None:
        self.parts = 0
        self._all = blake2b(digest_size=32)

    def part(self, kind: EntryKind, data: bytes, digest: bytes | None = None) -> bytes:
        """Return the bytes of a part. The digest of the plain bytes is given if data is compressed."""
        name = f"{kind}/{self.parts:08d}-{(digest or digest_of(data)).hex()}"
        member = _header(name, len(data)) + data + bytes(-len(data) % BLOCK)
        self._all.update(member)
        self.parts += 1
        return member

    def json(self, kind: EntryKind, value: object) -> bytes:
        """Return the bytes of a part that holds JSON."""
        return self.part(kind, orjson.dumps(value, option=orjson.OPT_SORT_KEYS))

    def seal(self) -> bytes:
        """Return the last bytes of the file."""
        return self.json("seal", {"parts": self.parts, "digest": self._all.hexdigest()}) + _END


def read(file: BinaryIO) -> Iterator[Part]:
    """Yield the parts of a bundle, each checked, the seal last. Raises BundleError if it is not a whole one."""
    everything, number = blake2b(digest_size=32), 0
    while True:
        digest_so_far = everything.hexdigest()
        part, member = _next(file, number)
        if part.kind == "seal":
            _check_seal(part, number, digest_so_far)
            if file.read(len(_END)) != _END or file.read(1):
                raise BundleError("the file continues after its seal, or is cut off. Export it again.")
            yield part
            return
        everything.update(member)
        number += 1
        yield part


def _next(file: BinaryIO, number: int) -> tuple[Part, bytes]:
    """Return the next part, and its bytes in the file without the padding of the tar's end."""
    header = file.read(BLOCK)
    name, size = _parse_header(header, number)
    kind, _, rest = name.partition("/")
    position, _, digest = rest.partition("-")
    if kind not in _KINDS or position != f"{number:08d}" or (number == 0) != (kind == "manifest"):
        raise BundleError(f"{_shown(name)} cannot be part {number}: this is not a Forkpoint export.")
    padded = size + -size % BLOCK
    stored = file.read(padded)
    if len(stored) < padded:
        raise BundleError(f"the file is cut off in part {_shown(name)}. Copy or export it again.")
    if any(stored[size:]):
        raise BundleError(f"part {_shown(name)} is damaged: its padding is not empty. Copy or export it again.")
    data = _inflated(name, stored[:size]) if kind == "zblob" else stored[:size]
    actual = digest_of(data)
    if actual.hex() != digest:
        raise BundleError(f"part {_shown(name)} is damaged: its digest is another. Copy or export it again.")
    return Part(kind, name, data, actual, stored[:size]), header + stored  # type: ignore[arg-type]


def _parse_header(header: bytes, number: int) -> tuple[str, int]:
    if len(header) < BLOCK:
        raise BundleError(f"the file is cut off before part {number}, or is not a Forkpoint export.")
    if header == bytes(BLOCK):
        raise BundleError(f"the file ends before part {number}, without its seal. Copy or export it again.")
    name = header[:100].rstrip(b"\0").decode("latin-1")
    try:
        size = int(header[124:135], 8)
    except ValueError:
        raise BundleError(
            f"the header of part {number} ({_shown(name)}) is damaged, or this is not an export."
        ) from None
    if size > MAX_PART_BYTES:
        raise BundleError(f"part {number} ({_shown(name)}) has more than {MAX_PART_BYTES} bytes: no export has such.")
    # Comparing with the header that the writer makes checks every other field, too.
    if not name.isascii() or _header(name, size) != header:
        raise BundleError(
            f"the header of part {number} ({_shown(name)}) is damaged, or this is not a Forkpoint export."
        )
    return name, size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, 0, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _inflated(name: str, data: bytes) -> bytes:
    # Not zlib.decompress: a small part of a false file could unpack to any size.
    inflating = zlib.decompressobj()
    try:
        unpacked = inflating.decompress(data, MAX_PART_BYTES)
    except zlib.error as error:
        raise BundleError(f"part {_shown(name)} is damaged: {error}. Copy or export it again.") from error
    if not inflating.eof or inflating.unused_data:
        raise BundleError(f"part {_shown(name)} is damaged, or larger than {MAX_PART_BYTES} bytes unpacked.")
    return unpacked


def _check_seal(part: Part, number: int, digest: str) -> None:
    try:
        seal = orjson.loads(part.data)
    except orjson.JSONDecodeError:
        seal = None
    if seal != {"parts": number, "digest": digest}:
        raise BundleError(f"part {part.name} does not seal the parts before it: some are missing or were changed.")


def _shown(name: str) -> str:
    return repr(name[:100])
