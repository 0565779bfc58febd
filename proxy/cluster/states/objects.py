"""The store that all members share, as named objects. No other module imports obstore.

It is a directory, or a bucket of S3, Google Cloud Storage or Azure. Credentials of a bucket come from the environment,
under the names that each provider's own tools use (`AWS_ACCESS_KEY_ID` and so on).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

SCHEMES = ("s3", "gs", "az", "azure", "abfs", "abfss")
OBJECT_PATIENCE_S = 30.0
"""How long one object of at most `manifests.CHUNK_BYTES` may take, in seconds: enough for 2 Mbit/s."""


class ObjectStoreError(Exception):
    """The store did not carry out a request. It may do so later."""


class MissingObjectError(Exception):
    """The store has no such object."""


class ObjectSizeError(Exception):
    """An object has another size than it should have."""


class ObjectStore:
    """Named objects, each of which is written as a whole."""

    def __init__(self, store: Any, url: str) -> None:
        self._store, self.url = store, url
        # Awaited before requests until it succeeds: whether the store may be used.
        self.admit: Callable[[], Awaitable[None]] | None = None

    async def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it. Raises ObjectStoreError: it is not known whether the object was written."""
        async with self._request():
            # One request: the pieces of an upload in parts would be garbage after a crash.
            await obstore.put_async(self._store, name, data, use_multipart=False)

    async def create(self, name: str, data: bytes) -> bool:
        """Write an object that does not exist yet; return False if it does. Of several members, one creates it."""
        async with self._request():
            try:
                await obstore.put_async(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    async def get(self, name: str, *, most_bytes: int, size_bytes: int | None = None) -> bytes:
        """Return an object. Raises MissingObjectError: the store has no such object. Raises ObjectSizeError."""
        async with self._request():
            try:
                result = await obstore.get_async(self._store, name)
            except FileNotFoundError as error:
                raise MissingObjectError(name) from error
            announced_bytes = int(result.meta["size"])
            if announced_bytes > most_bytes or size_bytes not in (None, announced_bytes):
                raise ObjectSizeError(f"{name} has {announced_bytes} bytes")
            data = bytearray()
            # What the store says of the size and what it sends may differ.
            async for piece in result.stream(min_chunk_size=1 << 20):
                data += bytes(piece)
                if len(data) > announced_bytes:
                    break
            if len(data) != announced_bytes:
                raise ObjectSizeError(f"{name} has not the {announced_bytes} bytes that the store names")
            return bytes(data)

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield the names of the objects below a prefix, up to 1,000 at once. Raises ObjectStoreError."""
        listing = obstore.list(self._store, prefix, chunk_size=1000)
        while True:
            async with self._request():
                page = await anext(listing, None)
            if page is None:
                return
            yield [str(each["path"]) for each in page]

    async def delete(self, names: Collection[str]) -> None:
        """Delete objects; one that does not exist is no error. Raises ObjectStoreError."""
        for name in names:
            async with self._request():
                try:
                    await obstore.delete_async(self._store, name)
                except FileNotFoundError:
                    continue

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        """Bound a request, and raise what obstore raises as an error of this module."""
        if self.admit is not None:
            await self.admit()
            self.admit = None
        try:
            async with asyncio.timeout(OBJECT_PATIENCE_S):
                yield
        except TimeoutError as error:
            raise ObjectStoreError(f"the store {self.url} did not answer within {OBJECT_PATIENCE_S:g} s") from error
        except (BaseError, OSError, ValueError) as error:
            raise ObjectStoreError(f"the store {self.url} failed: {_first_line(error)}") from error


def open_store(address: str) -> ObjectStore:
    """Return the store of a directory or URL. Nothing is read or written yet. Raises ValueError."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme not in (*SCHEMES, "file"):
        raise ValueError(f"it is not a directory, and of URLs {', '.join(SCHEMES)} are supported")
    may_be_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    if scheme == "s3" and os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://") and not may_be_http:
        raise ValueError("AWS_ENDPOINT_URL is not encrypted, which needs AWS_ALLOW_HTTP=true")
    try:
        if not separator or scheme == "file":
            return ObjectStore(LocalStore(Path(rest if separator else address).absolute(), mkdir=True), address)
        # Options that are given replace those of the environment.
        # A request is repeated here only briefly: the callers have a patience of their own.
        store = from_url(
            address,
            client_options={
                "allow_http": may_be_http,
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=OBJECT_PATIENCE_S),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
        )
    except (BaseError, OSError, ValueError) as error:
        raise ValueError(_first_line(error)) from error
    return ObjectStore(store, address)


def _first_line(error: Exception) -> str:
    """Return the message without the library's notes for its developers."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
