"""Objects of a directory, of memory and of S3, for which moto stands."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from obstore.store import MemoryStore

from forkpoint.ephemeral_proxy import free_port
from proxy.cluster.states.objects import (
    MissingObjectError,
    ObjectSizeError,
    ObjectStore,
    ObjectStoreError,
    open_store,
)
from tests.agents.clients import packages
from tests.machine import wait_until


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty bucket."""
    # Not in the development lock: its botocore needs an older python-dateutil than the lock has.
    place = packages("moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5", python=sys.executable)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(place)}, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: listens(port), "moto does not listen")
            for name, value in (
                ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1"),
                ("ENDPOINT_URL", address), ("ALLOW_HTTP", "true"),
            ):  # fmt: skip
                monkeypatch.setenv(f"AWS_{name}", value)
            httpx.put(f"{address}/bucket").raise_for_status()
            yield "s3://bucket/folder"
        finally:
            server.kill()


@pytest.fixture(params=["directory", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return ObjectStore(MemoryStore(), "memory")
    return open_store(str(tmp_path / "store") if request.param == "directory" else request.getfixturevalue("bucket"))


def test_objects_are_written_once_read_listed_and_deleted(store: ObjectStore) -> None:
    """All stores behave alike."""

    async def go() -> None:
        assert [await store.create("mark", b"1"), await store.create("mark", b"2")] == [True, False]
        created = await asyncio.gather(*(store.create("race", bytes([n])) for n in range(8)))
        assert created.count(True) == 1
        assert await store.get("mark", most_bytes=10) == b"1"
        await store.put("states/a/1/x", bytes(3 << 20))
        await store.put("states/b/1/x", b"y")
        await store.put("states/a/1/x", bytes(2 << 20))
        assert await store.get("states/a/1/x", most_bytes=2 << 20, size_bytes=2 << 20) == bytes(2 << 20)
        for bounds in ({"most_bytes": 1 << 20}, {"most_bytes": 3 << 20, "size_bytes": 1}):
            with pytest.raises(ObjectSizeError):
                await store.get("states/a/1/x", **bounds)
        assert [name async for page in store.names("states/a/") for name in page] == ["states/a/1/x"]
        await store.delete(["states/a/1/x", "states/a/1/x"])
        with pytest.raises(MissingObjectError):
            await store.get("states/a/1/x", most_bytes=10)

    asyncio.run(go())


def test_a_store_that_hangs_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a store for ever."""
    monkeypatch.setattr("proxy.cluster.states.objects.OBJECT_PATIENCE_S", 0.05)

    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("proxy.cluster.states.objects.obstore.put_async", hang)
    with pytest.raises(ObjectStoreError, match="did not answer"):
        asyncio.run(ObjectStore(MemoryStore(), "memory").put("name", b""))


async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request, a byte at a time; of a body that is sent, read a byte at a time."""
    with suppress(OSError, EOFError):
        try:
            is_read = (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET")
            if is_read:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\netag: x\r\n")
                writer.write(b"last-modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n\r\n")
            while True:
                if is_read:
                    writer.write(b"x")
                    await writer.drain()
                else:
                    await reader.readexactly(1)
                await asyncio.sleep(0.01)
        finally:
            writer.transport.abort()


REQUESTS: list[Callable[[ObjectStore], Awaitable[object]]] = [
    lambda store: store.get("name", most_bytes=1 << 20),
    lambda store: store.put("name", bytes(8 << 20)),
    lambda store: store.create("name", bytes(8 << 20)),
    lambda store: store.delete(["name"]),
    lambda store: anext(store.names("states/")),
]


@pytest.mark.parametrize("request_of", REQUESTS)
def test_a_store_that_trickles_fails_in_time(
    monkeypatch: pytest.MonkeyPatch, request_of: Callable[[ObjectStore], Awaitable[object]]
) -> None:
    """It sends and takes some bytes a second. The server is in this event loop, which a request must not block."""
    monkeypatch.setattr("proxy.cluster.states.objects.OBJECT_PATIENCE_S", 0.2)

    async def go() -> None:
        async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server:
            for name, value in (
                ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1"),
                ("ENDPOINT_URL", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), ("ALLOW_HTTP", "true"),
            ):  # fmt: skip
                monkeypatch.setenv(f"AWS_{name}", value)
            async with asyncio.timeout(30):
                with pytest.raises(ObjectStoreError):
                    await request_of(open_store("s3://bucket/folder"))

    asyncio.run(go())


def test_full_disk_is_an_error_of_the_store() -> None:
    """A directory that cannot be written."""
    with pytest.raises((ObjectStoreError, ValueError)):
        asyncio.run(open_store("/proc/none").put("name", b""))


@pytest.mark.parametrize("address", ["http://host/bucket", "ftp://host", "s3:///", "memory://"])
def test_unknown_stores_are_refused(address: str) -> None:
    """What is no bucket is named in a sentence."""
    with pytest.raises(ValueError, match=r"\w"):
        open_store(address)


def test_a_bucket_without_encryption_is_allowed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(ValueError, match="AWS_ALLOW_HTTP"):
        open_store("s3://bucket")
