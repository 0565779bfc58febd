"""Calls, uploads and answers as bytes: stored once for each content, and compressed where that saves space."""

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b

from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.errors import DamagedError, StoreError
from proxy.storage.schema import is_whole

_COMPRESS_FROM = 1024
"""Smallest blob that is compressed, in bytes: below it zlib saves less than the page of the database wastes."""
_SAMPLE_BYTES = 32 << 10
_SAMPLE_SHARE = 0.75
"""A blob is left as it is if its middle does not shrink to this share: random bytes, also as base64. 10 MB of them take
0.4 s of a CPU, text 0.1 s."""

DRAFT = "draft "
"""What the names of rows of `meta` begin with that say that a tree is being imported."""
_UNSWEPT = "unswept"
"""The row of `meta` that says that records were deleted since the last sweep, and when."""
_UNUSED = (
    "SELECT id FROM blobs WHERE id NOT IN "
    "(SELECT call FROM records UNION SELECT upload FROM records UNION SELECT answer FROM records)"
)
"""Takes 8 us for each record of the store."""
SLICE_S = 0.002
"""How long rows are deleted until the event loop has its turn. A blob of 10 MB takes 20 ms."""
_REST = 20
"""How often the time of a sweep passes before the next one. A store that forgets all the time sweeps 5 % of it."""

_READ = f"SELECT packed, data, digest, {is_whole('blobs')} FROM blobs WHERE id = ?"
_DIGEST = f"SELECT digest, {is_whole('blobs')} FROM blobs WHERE id = ?"


@dataclass(frozen=True, slots=True)
class PackedBlob:
    """Bytes as the store keeps them: compressed if that saves space."""

    digest: bytes  # BLAKE2b-256 of the uncompressed bytes.
    packed: bool
    data: bytes


def pack(data: bytes) -> PackedBlob:
    """Digest and compress bytes. Blocking without the interpreter's lock."""
    return _compressed(_digest(data), data)


class BlobStore:
    """Blobs by number. Equal bytes have one number, because a blob is looked up by its digest first."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database
        # Numbers of the blobs that were found damaged; the next insert of their bytes writes them again.
        self._damaged: set[int] = set()
        self._sweeping, self._rested_at = asyncio.Lock(), 0.0
        # The blobs that records were given since the sweep began that is under way; None between sweeps.
        self._given: set[int] | None = None

    def insert(self, execute: Execute, data: bytes | PackedBlob) -> int:
        """Return the number of these bytes, which are written if they are new. Large ones are packed before."""
        digest = data.digest if isinstance(data, PackedBlob) else _digest(data)
        row = self._database.row("SELECT id FROM blobs WHERE digest = ?", (digest,))
        if row is not None and row[0] not in self._damaged:
            self._require_digest(row[0], digest)
            return self._give(row[0])
        blob = data if isinstance(data, PackedBlob) else _compressed(digest, data)
        if row is not None:
            # Every record that names this blob is whole again.
            values = (blob.packed, blob.data, digest, row[0])
            execute("UPDATE blobs SET packed = ?, data = ?, digest = ? WHERE id = ?", values)
            self._damaged.discard(row[0])
            return self._give(row[0])
        return self.insert_stored(execute, digest, packed=blob.packed, data=blob.data)

    def insert_stored(self, execute: Execute, digest: bytes, *, packed: bool, data: bytes) -> int:
        """Write a blob unless the store has it, and return its number. The digest is of the uncompressed bytes."""
        blob = self._database.take_number("blobs")
        execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", (blob, digest, packed, data))
        return blob

    def number_of(self, digest: bytes) -> int:
        """Return the number of the blob with this digest. Raises StoreError if the store has no such blob."""
        row = self._database.row("SELECT id FROM blobs WHERE digest = ?", (digest,))
        if row is None:
            raise StoreError(f"the blob {digest.hex()} of an import is not in the store. Import the file again.")
        return self._give(row[0])

    def read(self, blob: int) -> bytes:
        """Return the uncompressed bytes of a blob. Raises DamagedError if they differ or are gone, or StoreError."""
        row = self._database.row(_READ, (blob,))
        data = whole_bytes(*row[:3]) if row is not None and row[3] else None
        if data is not None:
            return data
        self._damaged.add(blob)
        raise DamagedError(f"blob {blob} of the store is damaged: a disk or another program has changed the file.")

    def _require_digest(self, blob: int, digest: bytes) -> None:
        """Raise DamagedError for a blob of another digest: a damaged index would give a record foreign bytes."""
        row = self._database.row(_DIGEST, (blob,))
        if row is None or row[0] != digest or not row[1]:
            self._damaged.add(blob)
            raise DamagedError("the index of the store's blobs is damaged. Restore the file from a copy.")

    async def sweep(self) -> None:
        """Delete the blobs that no record names if records were deleted since the last sweep, unless it is too soon."""
        if time.monotonic() >= self._rested_at and self._noted() is not None:
            await self.delete_unused()

    async def delete_unused(self) -> None:
        """Delete the blobs that no record names. It looks at all records, in a thread."""
        async with self._sweeping:
            began_at, noted, self._given = time.monotonic(), self._noted(), set()
            try:
                unused = await asyncio.to_thread(self._database.read_apart, _unused)
                if await self._delete(unused, self._given):
                    with self._database.transaction() as execute:
                        execute("DELETE FROM meta WHERE name = ? AND value = ?", (_UNSWEPT, noted))
            finally:
                self._given, now = None, time.monotonic()
                self._rested_at = now + _REST * (now - began_at)

    async def _delete(self, unused: list[int], given: AbstractSet[int]) -> bool:
        # The blobs of a tree that is being imported come before its records.
        while not (imports := self._imports()) and unused:
            with self._database.transaction() as execute:
                until = time.monotonic() + SLICE_S
                while unused and time.monotonic() < until:
                    blob = unused.pop()
                    if blob not in given:
                        execute("DELETE FROM blobs WHERE id = ?", (blob,))
            await asyncio.sleep(0)
        return not imports

    def _noted(self) -> str | None:
        row = self._database.row("SELECT value FROM meta WHERE name = ?", (_UNSWEPT,))
        return None if row is None else row[0]

    def _give(self, blob: int) -> int:
        if self._given is not None:
            self._given.add(blob)
        return blob

    def _imports(self) -> bool:
        return self._database.row("SELECT 1 FROM meta WHERE name GLOB ?", (f"{DRAFT}*",)) is not None


def _unused(connection: sqlite3.Connection) -> list[int]:
    return [blob for (blob,) in connection.execute(_UNUSED)]


def whole_bytes(packed: int, data: bytes, digest: bytes) -> bytes | None:
    """Return the uncompressed bytes of a blob by its columns; None if they are not those that were written."""
    try:
        content = zlib.decompress(data) if packed else bytes(data)
    # A flipped bit may also change the type of a column.
    except (zlib.error, TypeError, ValueError):
        return None
    return content if _digest(content) == digest else None


def blob_of(connection: sqlite3.Connection, number: int) -> bytes | None:
    """Return the bytes of a blob by a connection that only reads; None if they are not those that were written."""
    row = connection.execute("SELECT packed, data, digest FROM blobs WHERE id = ?", (number,)).fetchone()
    return None if row is None else whole_bytes(*row)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def _compressed(digest: bytes, data: bytes) -> PackedBlob:
    packed = zlib.compress(data, 1) if _shrinks(data) else data
    smaller = len(packed) < len(data)
    return PackedBlob(digest, smaller, packed if smaller else data)


def _shrinks(data: bytes) -> bool:
    if len(data) <= 2 * _SAMPLE_BYTES:
        return len(data) >= _COMPRESS_FROM
    middle = len(data) // 2
    sample = data[middle : middle + _SAMPLE_BYTES]
    return len(zlib.compress(sample, 1)) <= _SAMPLE_SHARE * _SAMPLE_BYTES


def delete_unused_blobs(execute: Execute) -> None:
    """Delete the blobs that no record names, within a transaction: for a store from which nobody is served."""
    execute(f"DELETE FROM blobs WHERE id IN ({_UNUSED})")


def note_unused_blobs(execute: Execute) -> None:
    """Let the next sweep look for blobs that no record names, within a transaction that deleted records."""
    # It would look at all records of the store, whose calls wait meanwhile.
    execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_UNSWEPT, str(time.time_ns())))
