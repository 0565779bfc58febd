"""Calls, uploads and answers as bytes: stored once for each content, and compressed where that saves space."""

import zlib
from hashlib import blake2b

from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.errors import StoreError

_COMPRESS_FROM = 1024
"""Smallest blob that is compressed, in bytes: below it zlib saves less than the page of the database wastes."""


class BlobStore:
    """Blobs by number. Equal bytes have one number, because a blob is looked up by its digest first."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def insert(self, execute: Execute, data: bytes) -> int:
        """Return the number of these bytes, which are written if they are new."""
        digest = blake2b(data, digest_size=32).digest()
        row = self._database.row("SELECT id FROM blobs WHERE digest = ?", (digest,))
        if row is not None:
            return int(row[0])
        packed = zlib.compress(data, 1) if len(data) >= _COMPRESS_FROM else data
        smaller = len(packed) < len(data)
        return self.insert_stored(execute, digest, packed=smaller, data=packed if smaller else data)

    def insert_stored(self, execute: Execute, digest: bytes, *, packed: bool, data: bytes) -> int:
        """Write a blob whose digest is known, unless the store has it, and return the number it would have.

        Args:
            execute: The running transaction.
            digest: BLAKE2b-256 of the uncompressed bytes.
            packed: Whether data is compressed.
            data: The bytes as they are stored.
        """
        blob = self._database.take_number("blobs")
        execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", (blob, digest, packed, data))
        return blob

    def number_of(self, digest: bytes) -> int:
        """Return the number of the blob with this digest.

        Raises:
            StoreError: The store has no such blob.
        """
        row = self._database.row("SELECT id FROM blobs WHERE digest = ?", (digest,))
        if row is None:
            raise StoreError(f"the blob {digest.hex()} of an import is not in the store. Import the file again.")
        return int(row[0])

    def read(self, blob: int) -> bytes:
        """Return the uncompressed bytes of a blob.

        Raises:
            StoreError: The store has no such blob.
        """
        row = self._database.row("SELECT packed, data FROM blobs WHERE id = ?", (blob,))
        if row is None:
            raise StoreError(f"blob {blob} is not in the store: another program damaged or changed the file.")
        return zlib.decompress(row[1]) if row[0] else bytes(row[1])

    def delete_unused(self) -> None:
        """Delete the blobs that no record names."""
        with self._database.transaction() as execute:
            delete_unused_blobs(execute)


def delete_unused_blobs(execute: Execute) -> None:
    """Delete the blobs that no record names, within a transaction that deleted records."""
    used = "SELECT call FROM records UNION SELECT upload FROM records UNION SELECT answer FROM records"
    execute(f"DELETE FROM blobs WHERE id NOT IN ({used})")
