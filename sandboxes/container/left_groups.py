"""The control groups of containers that were started without Docker: who started them removes the groups too."""

import json
import time
from pathlib import Path

RUNTIME = "runc"
"""The directory of the OCI runtime's own files, in the directory of a container."""

GONE_S = 5.0
"""Longest wait for the groups of a container that was killed to be empty. It takes milliseconds.

The value is an estimate.
"""


def control_groups(folder: Path, name: str) -> list[Path]:
    """Return the control groups that the runtime has made for a container; none if it has not got so far."""
    try:
        state = json.loads((folder / RUNTIME / name / "state.json").read_bytes())
    except (OSError, ValueError):
        return []
    return [Path(path) for path in state["cgroup_paths"].values()]


def remove_groups(groups: list[Path]) -> None:
    """Remove the control groups of a container that was killed, once all of its processes have ended.

    What cannot be removed within `GONE_S` stays, and so it is for the next start of the proxy.
    """
    deadline = time.monotonic() + GONE_S
    while groups and time.monotonic() < deadline:
        groups = [group for group in groups if not _is_removed(group)]
        if groups:
            time.sleep(0.001)


def _is_removed(group: Path) -> bool:
    """Remove a group with the groups in it, which only a process with rights could have made; False if it is in use."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
