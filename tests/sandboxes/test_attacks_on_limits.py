"""The attacks of `python -m bench.attacks` on what all sandboxes of a machine share."""

import asyncio
from pathlib import Path

import pytest

from bench import attacks, attacks_on_data
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver, opened
from tests.sandboxes.test_attacks import through


@pytest.mark.alone
def test_what_is_shared_is_left_to_others(data_dir: Path) -> None:
    """The limits are those of the sandbox's user and control group, whatever its root."""
    require_sandboxes()

    async def hold() -> list[attacks_on_data.Outcome]:
        async with opened(local_driver(data_dir)) as driver:
            return await attacks.hold_shared(driver)

    assert through(asyncio.run(hold())) == []
