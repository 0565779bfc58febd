"""The file that a tree travels in: a tar whose parts name their own digests, and whose last one seals the rest (pure).

    manifest/00000000-<digest>   what this is: versions, spec, root key, counts
    blob, zblob/…-<digest>       a call or an answer, as it is or compressed; the digest is that of what it holds
    batch/…-<digest>             nodes and records, a JSON line each: a line only speaks of what came before it
    part, chunk, snapshot/…      kept states, if they were asked for: units in pieces, then a state that needs them
    seal/…-<digest>              how many parts there are, and the digest of every byte before

Any tar can list and unpack it. The reader is stricter: each header must be, bit by bit, the one that the writer makes
of the part's name and size, and padding is zeros; so one flipped bit anywhere is seen, and the part named.
"""

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO, Literal, get_args

import orjson

FORMAT = 1
"""Of this file: raise it when an older reader would misread a newer file."""
BLOCK = 512
MAX_PART_BYTES = 1 << 29
"""Of one part, also when unpacked: an answer is smaller."""
CHUNK_BYTES = 1 << 20
EntryKind = Literal["manifest", "blob", "zblob", "batch", "snapshot", "part", "chunk", "seal"]
_KINDS = frozenset(get_args(EntryKind))
_END = bytes(2 * BLOCK)


class BundleError(ValueError):
    """A file is no bundle, or not a whole and undamaged one; it says which part is wrong."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part. data: what it holds, unpacked; digest: of that. stored: as it lies in the file."""

    kind: EntryKind
    name: str
    data: bytes
    digest: bytes
    stored: bytes


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


class Writer:
    """Makes the bytes of a bundle, part by part."""

    def __init__(self) -> None:
        self.parts = 0
        self._all = blake2b(digest_size=32)

    def part(self, kind: EntryKind, data: bytes, digest: bytes | None = None) -> bytes:
        """Return the bytes of a part. digest: of what data holds, where that is not data itself."""
        name = f"{kind}/{self.parts:08d}-{(digest or digest_of(data)).hex()}"
        told = _header(name, len(data)) + data + bytes(-len(data) % BLOCK)
        self._all.update(told)
        self.parts += 1
        return told

    def json(self, kind: EntryKind, value: object) -> bytes:
        """Return the bytes of a part that holds JSON."""
        return self.part(kind, orjson.dumps(value, option=orjson.OPT_SORT_KEYS))

    def seal(self) -> bytes:
        """Return the last bytes."""
        return self.json("seal", {"parts": self.parts, "digest": self._all.hexdigest()}) + _END


def read(file: BinaryIO) -> Iterator[Part]:
    """Yield the parts of a bundle, each checked, the seal last. Memory: one part.

    Raises:
        BundleError: the file is something else, damaged, cut off, or goes on after its seal.
    """
    everything, number = blake2b(digest_size=32), 0
    while True:
        so_far = everything.hexdigest()
        part, told = _next(file, number)
        if part.kind == "seal":
            _check_seal(part, number, so_far)
            if file.read(len(_END)) != _END or file.read(1):
                raise BundleError("after its seal the file goes on, or is cut off. Export it again.")
            yield part
            return
        everything.update(told)
        number += 1
        yield part


def _next(file: BinaryIO, number: int) -> tuple[Part, bytes]:
    header = file.read(BLOCK)
    name, size = _named(header, number)
    kind, _, rest = name.partition("/")
    place, _, digest = rest.partition("-")
    if kind not in _KINDS or place != f"{number:08d}" or (number == 0) != (kind == "manifest"):
        raise BundleError(f"{_shown(name)} is not what part {number} may be: this is no Forkpoint export.")
    padded = size + -size % BLOCK
    stored = file.read(padded)
    if len(stored) < padded:
        raise BundleError(f"the file is cut off in part {_shown(name)}. Copy or export it again.")
    if any(stored[size:]):
        raise BundleError(f"part {_shown(name)} is damaged: its padding is not empty. Copy or export it again.")
    data = _inflated(name, stored[:size]) if kind == "zblob" else stored[:size]
    found = digest_of(data)
    if found.hex() != digest:
        raise BundleError(f"part {_shown(name)} is damaged: its digest is another. Copy or export it again.")
    return Part(kind, name, data, found, stored[:size]), header + stored  # type: ignore[arg-type]


def _named(header: bytes, number: int) -> tuple[str, int]:
    if len(header) < BLOCK:
        raise BundleError(f"the file is cut off before part {number}, or is no Forkpoint export.")
    if header == bytes(BLOCK):
        raise BundleError(f"the file ends before part {number}, without its seal. Copy or export it again.")
    name = header[:100].rstrip(b"\0").decode("latin-1")
    try:
        size = int(header[124:135], 8)
    except ValueError:
        raise BundleError(f"the header of part {number} ({_shown(name)}) is damaged, or this is no export.") from None
    if size > MAX_PART_BYTES:
        raise BundleError(f"part {number} ({_shown(name)}) is larger than {MAX_PART_BYTES} bytes: no export has such.")
    if not name.isascii() or _header(name, size) != header:
        raise BundleError(f"the header of part {number} ({_shown(name)}) is damaged, or this is no Forkpoint export.")
    return name, size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, 0, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _inflated(name: str, data: bytes) -> bytes:
    inflating = zlib.decompressobj()
    try:
        found = inflating.decompress(data, MAX_PART_BYTES)
    except zlib.error as error:
        raise BundleError(f"part {_shown(name)} is damaged: {error}. Copy or export it again.") from error
    if not inflating.eof or inflating.unused_data:
        raise BundleError(f"part {_shown(name)} is damaged, or larger than {MAX_PART_BYTES} bytes unpacked.")
    return found


def _check_seal(part: Part, number: int, digest: str) -> None:
    try:
        told = orjson.loads(part.data)
    except orjson.JSONDecodeError:
        told = None
    if told != {"parts": number, "digest": digest}:
        raise BundleError(f"part {part.name} does not seal what came before it: parts are missing, or were changed.")


def _shown(name: str) -> str:
    return repr(name[:100])
