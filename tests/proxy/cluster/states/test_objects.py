"""Objects of a directory, of memory and, where moto is installed, of S3."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from obstore.store import MemoryStore

from proxy.cluster.states.objects import (
    MissingObjectError,
    ObjectSizeError,
    ObjectStore,
    ObjectStoreError,
    open_store,
)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty bucket."""
    # Not in the development lock: its botocore needs an older python-dateutil than the lock has.
    server = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[s3]' flask flask-cors")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    address = "http://{}:{}".format(*running.get_host_and_port())
    for name, value in (
        ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1"), ("ENDPOINT_URL", address),
        ("ALLOW_HTTP", "true"),
    ):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    httpx.put(f"{address}/bucket").raise_for_status()
    yield "s3://bucket/folder"
    running.stop()


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
