"""The connection to the Docker daemon."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.container import daemon as module
from sandboxes.container.sandbox import ContainerSandbox
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
