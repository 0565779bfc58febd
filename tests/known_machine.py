"""What drivers find out about this machine, found out once in each process of the tests.

1. What not everybody may read of its system: 57,000 files are looked at for each new data directory.
2. Whether CRIU works on its kernel: `criu check` runs for each driver that keeps live processes.
3. Whether its drivers work: each start of a proxy runs `true` in a sandbox of its own. Only forks take it as known.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from proxy.cli import doctor
from proxy.settings import Settings
from sandboxes import plugins
from sandboxes.linux.syscalls import OLDER_MOUNTS
from sandboxes.local import host_base
from snapshots.criu import binary

_walk, _probe, _try = host_base._unreadable, binary._probe_kernel, doctor._trials


@cache
def _found(top: str) -> tuple[str, ...]:
    return tuple(_walk(top))


def remember() -> None:
    """Have drivers of this process, and of its forks, use what was found first."""
    host_base.__dict__["_unreadable"] = lambda top: iter(_found(top))
    binary.__dict__["_probe_kernel"] = cache(_probe)


def forget() -> None:
    """Have drivers of this process look: it may have lost the right to."""
    host_base.__dict__["_unreadable"] = _walk
    binary.__dict__["_probe_kernel"] = _probe
    doctor.__dict__["_trials"] = _try


def look() -> None:
    """Look now, for forks that are made later, and try the drivers that each of them has."""
    for name in host_base.SEARCHED:
        _found(f"/{name}")
    for path in map(Path, binary._PATHS):
        # Where it does not work, each driver finds out for itself.
        with suppress(binary.CriuMissingError):
            if path.is_file():
                binary._probe_kernel(path)
    with tempfile.TemporaryDirectory(prefix="forkpoint-test-", dir="/var/tmp") as folder:
        device, tried = Path(folder).stat().st_dev, _try(Path(folder), Settings().driver_names)
    # A fork may have other packages on its path.
    plugins.installed.cache_clear()
    plugins.load.cache_clear()
    works = {requirement.driver: requirement for requirement in tried if requirement.ok}

    def trials(data_dir: Path, names: Sequence[str]) -> list[doctor.Requirement]:
        same = doctor._existing(data_dir).stat().st_dev == device and OLDER_MOUNTS not in os.environ
        known = [works[name] for name in names if same and name in works]
        unknown = [name for name in names if not same or name not in works]
        return [*known, *_try(data_dir, unknown)]

    doctor.__dict__["_trials"] = trials
