"""Request bodies: in memory up to a limit; beyond it on disk, where whoever they are for takes them as they are."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.http.asgi import AsgiMessage, Receive
from proxy.refusals import RefusalError

SPOOLED = 64
"""How many times the limit in memory one on disk may be."""


class ClientDisconnectedError(Exception):
    """The client left before its request was complete."""


class Upload:
    """A body that may outgrow memory. path: where it lies then; None while it does not, or may not."""

    def __init__(self, folder: Path, *, max_bytes: int, spools: bool) -> None:
        self._folder, self._max_bytes, self._spools = folder, max_bytes, spools
        self._chunks: list[bytes] = []
        self._size = 0
        self._fd = -1
        self.path: Path | None = None

    async def receive(self, receive: Receive, message: AsgiMessage) -> bytes:
        """Take the rest of a body, of which message is the first part; return it, or nothing where it lies on disk.

        Raises:
            Hangup: it did not come whole. Refused: 413, it is too large.
        """
        while True:
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            self._take(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(self._chunks)
            message = await receive()

    def _take(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._max_bytes * (SPOOLED if self._spools else 1):
            where = f"{SPOOLED} times max_body_bytes" if self._spools else "max_body_bytes"
            raise RefusalError(
                413, "body", f"the body is larger than {where}, {self._max_bytes}. Send less, or raise it."
            )
        if self.path is None and self._size > self._max_bytes:
            self._fd, name = tempfile.mkstemp(prefix="upload-", dir=self._folder)
            self.path = Path(name)
            for kept in self._chunks:
                os.write(self._fd, kept)
            self._chunks.clear()
        if self.path is None:
            self._chunks.append(chunk)
        else:
            os.write(self._fd, chunk)

    def close(self) -> None:
        """Remove what lies on disk."""
        if self.path is not None:
            os.close(self._fd)
            self.path.unlink(missing_ok=True)


@contextmanager
def uploading(folder: Path, *, max_bytes: int, spools: bool) -> Iterator[Upload]:
    """Lend a place for one body. spools: whether it may lie on disk."""
    upload = Upload(folder, max_bytes=max_bytes, spools=spools)
    try:
        yield upload
    finally:
        upload.close()
