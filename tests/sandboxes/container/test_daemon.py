"""The connection to the Docker daemon."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.container import daemon as module
from sandboxes.container.daemon import Daemon
from sandboxes.container.driver import ContainerDriver
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened
from tests.sandboxes.docker import OnImage


def test_container_that_does_not_end_is_killed(container_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that hangs kills nothing; its container goes all the same."""
    monkeypatch.setattr(module, "ENDED_S", 1)

    async def go() -> None:
        async with opened(OnImage(container_dir, spares=0, docker_starts=True)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            assert isinstance(driver, OnImage)
            assert isinstance(sandbox, ContainerSandbox)
            daemon, container = driver.daemon, sandbox.container
            assert container in [known for known, _ in await asyncio.to_thread(daemon.labelled)]
            await asyncio.to_thread(daemon.remove, container, is_ending=True)
            assert container not in [known for known, _ in await asyncio.to_thread(daemon.labelled)]
            # A container that is gone already.
            await asyncio.to_thread(daemon.remove, container, is_ending=True)

    asyncio.run(go())


@pytest.fixture
def silent() -> Iterator[str]:
    """A daemon that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def full() -> Iterator[str]:
    """A daemon whose disk is full."""
    body = b'{"message": "write /var/lib/docker/x: no space left on device"}'
    answer = (
        b"HTTP/1.1 500 Error\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % len(body)
    )

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = server.accept()
                with end:
                    end.recv(65536)
                    end.sendall(answer + body)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("down", "no Docker daemon responds"), ("silent", "gave no response within"), ("full", "disk is full")],
)
def test_daemon_failures_are_named(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("sandboxes.container.daemon.TIMEOUT_S", 1.0 if kind == "silent" else 30.0)
    monkeypatch.setattr("sandboxes.container.daemon.PAUSES_S", (0.01,))
    where = f"unix://{tmp_path}/none.sock" if kind == "down" else request.getfixturevalue(kind)
    monkeypatch.setenv("DOCKER_HOST", where)
    daemon = Daemon()
    with pytest.raises(SandboxError, match=says):
        daemon.check()
    daemon.close()
    driver = ContainerDriver(tmp_path / "data")
    with pytest.raises(SandboxError, match=says):
        asyncio.run(driver.open())
    # And nothing is held that would hinder a later try.
    with pytest.raises(SandboxError, match=says):
        asyncio.run(ContainerDriver(tmp_path / "data").open())
