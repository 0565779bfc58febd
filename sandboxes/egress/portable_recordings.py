"""Export and import of recordings: each travels as the file that it is; see `sandboxes.portability`.

An imported file is taken for hostile: it must be a recording that the egress proxy here could have written. It never
replaces a recording of this machine, and it answers only sandboxes of the importing environment, whose name begins its
own.
"""

import filecmp
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from sandboxes.egress.recordings import MAX_BODY_BYTES, MAX_HEADERS, REFRAMED, is_recorded, read
from sandboxes.http_message import end_to_end, is_header
from sandboxes.portability import NotPortableError

_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20


class PortableRecordings:
    """The recordings of one environment."""

    def __init__(
        self, folder: Path, scope: str, recount: Callable[[], Awaitable[None]], doubt: Callable[[], None]
    ) -> None:
        """Describe an environment's recordings; `doubt` is called when the exporting machine had another recording."""
        self._folder, self._scope, self._recount, self._doubt = folder, scope, recount, doubt

    def names(self) -> list[str]:
        """Return the names of the recordings; each is a digest of the request. Blocking."""
        return sorted(path.name.partition("-")[2] for path in self._folder.glob(f"{self._scope}-*"))

    def pack(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a recording. Blocking. A damaged one is a `ValueError`."""
        with self._path(name).open("rb") as file:
            read(file)
            yield from iter(lambda: file.read(_CHUNK_BYTES), b"")

    def take(self, name: str, file: Path) -> None:
        """Make a file a recording, unless its request has one; NotPortableError if we would not write it. Blocking."""
        if _NAME.fullmatch(name) is None:
            raise NotPortableError(f"{name[:80]!r} names no recording")
        _check(file)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # A link, because a rename would replace a recording that is there (rename(2)).
            os.link(file, self._path(name))
        except FileExistsError:
            if not filecmp.cmp(file, self._path(name), shallow=False):
                self._doubt()

    async def settle(self) -> None:
        """Let the egress proxy count what was taken, and remove the least recently used recordings if needed."""
        await self._recount()

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._scope}-{name}"


def _check(path: Path) -> None:
    with path.open("rb") as file:
        try:
            response = read(file)
            headers = [(str(name), str(value)) for name, value in response.headers]
            is_whole = (
                type(response.status) is int
                and is_recorded(response.status)
                and response.length <= MAX_BODY_BYTES
                and len(headers) <= MAX_HEADERS
                and tuple(headers) == response.headers == end_to_end(headers, without=REFRAMED)
                and all(is_header(name, value) for name, value in headers)
            )
        except (ValueError, TypeError, LookupError, RecursionError, OSError) as error:
            raise NotPortableError(f"it cannot be read: {error}") from error
    if not is_whole:
        raise NotPortableError("it has a status, headers or a length that no recording has")
