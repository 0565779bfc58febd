"""Attacks on CRIU from inside a local sandbox. Each is really tried."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from tests.machine import require_criu
from tests.sandboxes.box import local_driver, opened, run
from tests.sandboxes.checkpoint_attacks import SPEC, WAIT, CheckpointAttacks


class TestLocalCheckpointAttacks(CheckpointAttacks):
    way_out = "/proc/1/fd/4" + "/.." * 12

    @pytest.fixture(autouse=True)
    def _directory(self, data_dir: Path) -> None:
        require_criu()
        self._data_dir = data_dir

    def driver(self) -> LocalDriver:
        return local_driver(self._data_dir)

    def kept_files(self, driver: Any, frozen: FrozenState) -> Path:
        return Path(driver.machine.layers.frozen / frozen.payload["layers"][0] / "diff")

    def foreign_processes(self, driver: Any) -> list[int]:  # noqa: ARG002
        spaces: dict[int, str] = {}
        sandboxes: set[str] = set()
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            try:
                spaces[pid] = str(Path(f"/proc/{pid}/ns/pid").readlink())
                root = next(
                    (line for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if " / / " in line), ""
                )
            except OSError:
                continue
            # A sandbox's root is an overlay of ours. Spares have the host's root until they become sandboxes.
            if " overlay " in root and str(self._data_dir) in root:
                sandboxes.add(spaces[pid])
        # CRIU's operator has entered the mounts of a sandbox, but the sandbox does not see it.
        sandboxes.discard(spaces[os.getpid()])
        return [pid for pid, space in spaces.items() if space in sandboxes]

    def test_too_many_names_are_refused(self) -> None:
        """The processes stand still while their names are looked at, so this must not take long."""
        holds = "import os, time; n = os.sysconf('SC_OPEN_MAX') - 100; held = [os.dup(0) for _ in range(n)]; "
        holds += "all(os.fork() for _ in range(21000 // n)) and open('ready', 'w'); time.sleep(1000)"

        async def go() -> None:
            async with opened(self.driver()) as driver:
                sandbox = await driver.start(SPEC)
                await run(sandbox, f'ulimit -n $(ulimit -Hn); python3 -c "{holds}" & {WAIT}', timeout_s=60)
                with pytest.raises(NotFreezableError, match="names"):
                    await sandbox.freeze()

        asyncio.run(go())
