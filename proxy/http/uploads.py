"""Request bodies: in memory up to a limit, and beyond it in a file, for endpoints that forward them unread."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.http.asgi import AsgiMessage, Receive
from proxy.refusals import RefusalError

SPOOL_FACTOR = 64
"""How many times larger than the limit in memory a body in a file may be; 1 GiB by default."""


class ClientDisconnectedError(Exception):
    """The client disconnected before its request was complete."""


class Upload:
    """A request body that is moved to a file if it outgrows memory."""

    def __init__(self, folder: Path, *, max_bytes: int, spools: bool) -> None:
        self._folder, self._max_bytes, self._spools = folder, max_bytes, spools
        self._chunks: list[bytes] = []
        self._size = 0
        self._fd = -1
        self.path: Path | None = None  # The file that holds the body; None while the body is in memory.

    async def receive(self, receive: Receive, message: AsgiMessage) -> bytes:
        """Receive the rest of a body, empty if it is in `path`. Raises ClientDisconnectedError, RefusalError (413)."""
        while True:
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            self._add(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(self._chunks)
            message = await receive()

    def _add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._max_bytes * (SPOOL_FACTOR if self._spools else 1):
            limit = f"{SPOOL_FACTOR} times max_body_bytes" if self._spools else "max_body_bytes"
            raise RefusalError(
                413, "body", f"the body is larger than {limit}, {self._max_bytes}. Send less, or raise the setting."
            )
        if self.path is None and self._size > self._max_bytes:
            self._fd, name = tempfile.mkstemp(prefix="upload-", dir=self._folder)
            self.path = Path(name)
            for held in self._chunks:
                os.write(self._fd, held)
            self._chunks.clear()
        if self.path is None:
            self._chunks.append(chunk)
        else:
            os.write(self._fd, chunk)

    def close(self) -> None:
        """Delete the file, if there is one."""
        if self.path is not None:
            os.close(self._fd)
            self.path.unlink(missing_ok=True)


@contextmanager
def uploading(folder: Path, *, max_bytes: int, spools: bool) -> Iterator[Upload]:
    """Yield an empty upload, with `max_bytes` in memory or else a file, if it `spools`; delete the file."""
    upload = Upload(folder, max_bytes=max_bytes, spools=spools)
    try:
        yield upload
    finally:
        upload.close()
