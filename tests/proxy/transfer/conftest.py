"""The bundle of a small tree."""

import asyncio

import pytest

from tests.proxy.rig import engine
from tests.proxy.transfer.rig import exported, walked


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    async def go() -> bytes:
        async with engine(tmp_path_factory.mktemp("data")) as here:
            await walked(here, "task", [["echo 1 > f", "cat f", "echo 2 > f"], ["cat seed", f"echo {'x' * 3000}"]])
            return await exported(here, "task")

    return asyncio.run(go())
