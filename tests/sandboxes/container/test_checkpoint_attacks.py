"""Attacks on CRIU from inside a container. Each is really tried."""

from pathlib import Path
from typing import Any

import pytest

from sandboxes.driver import FrozenState
from tests.machine import require_criu
from tests.sandboxes.checkpoint_attacks import CheckpointAttacks
from tests.sandboxes.docker import OnImage, first_processes


class TestContainerCheckpointAttacks(CheckpointAttacks):
    # CRIU's number in a restored sandbox is 1,001 above the highest restored one, and it has the images at 7.
    way_out = "/proc/1010/fd/7" + "/.." * 12

    @pytest.fixture(autouse=True)
    def _directory(self, container_dir: Path) -> None:
        require_criu()
        self._data_dir = container_dir

    def driver(self) -> Any:
        return OnImage(self._data_dir, checkpoints=True, spares=0)

    def kept_files(self, driver: Any, frozen: FrozenState) -> Path:
        return Path(driver.states.folder / frozen.payload["copy"] / "diff")

    def foreign_processes(self, driver: Any) -> list[int]:  # noqa: ARG002
        first = first_processes(self._data_dir).values()
        spaces = {str(Path(f"/proc/{pid}/ns/pid").readlink()) for pid in first if Path(f"/proc/{pid}").exists()}
        results = []
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            try:
                if str(Path(f"/proc/{pid}/ns/pid").readlink()) in spaces:
                    results.append(pid)
            except OSError:
                continue
        return results
