"""Orphans: containers that run although Docker has forgotten them.

A Docker daemon that is killed while it starts a container can leave such a container behind. It has no label any more,
but it still has its box: Docker mounts the box before anything of the image runs, and a container cannot unmount it.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from sandboxes.container.boot_scripts import BOX

NEWCOMERS_S = 20.0
"""How long a dead proxy's containers are waited for. Docker starts one in 0.3 s, and in seconds on a busy machine."""
_POLL_S = 0.1

DevicePath = tuple[str, str]
"""A device and a path on it, which name a directory in every mount namespace."""


def kill_orphans(boxes: Path, known: Collection[str]) -> set[str]:
    """Kill every container that has a box with an unknown name. Milliseconds for a hundred processes.

    Args:
        boxes: The directory of this instance's boxes.
        known: The names of the boxes in use.

    Returns:
        The names of the boxes whose containers were killed.
    """
    return _kill_containers(boxes, lambda name: name not in known)


def kill_newcomers(boxes: Path, kept: Collection[str]) -> None:
    """Kill the containers of a proxy that died, and wait for those that a daemon is still starting for it.

    Takes at most `NEWCOMERS_S`; a moment if there are no boxes.

    Args:
        boxes: The directory of the dead proxy's boxes.
        kept: The names of the boxes whose containers have a keeper. It kills its container; one that failed is helped.

    Raises:
        OSError: There is no such directory.
    """
    deadline = time.monotonic() + NEWCOMERS_S
    # By name: a new proxy of the same data directory may start containers meanwhile, with names of its own.
    names = set(os.listdir(boxes))  # noqa: PTH208 - names only
    missing = names.difference(kept)
    while True:
        missing -= _kill_containers(boxes, names.__contains__)
        # A next proxy empties the directory, and has removed what it found.
        missing = {name for name in missing if (boxes / name).exists()}
        if not missing or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _kill_containers(boxes: Path, is_chosen: Callable[[str], bool]) -> set[str]:
    killed: set[str] = set()
    for name, _, process in running(boxes):
        if is_chosen(name):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                killed.add(name)
    return killed


def running(boxes: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the containers that have a box here: its name, and their pid 1, also as a descriptor until the next one."""
    device, folder = _device_path(boxes)
    for pid in _first_processes():
        # The descriptor comes first: from here on the signal below reaches this process or none, even if its pid is
        # given to another process meanwhile.
        try:
            process = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            box = _box(Path(f"/proc/{pid}/mountinfo"))
            if box is None or box[0] != device or not box[1].startswith(f"{folder}/"):
                continue
            yield box[1].removeprefix(f"{folder}/").split("/")[0], pid, process
        except OSError:
            # The process ended meanwhile.
            continue
        finally:
            os.close(process)


def _first_processes() -> Iterator[int]:
    """Yield pid 1 of every pid namespace below this one, by the pids of this namespace."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - many
        if name.isdigit():
            with contextlib.suppress(OSError, StopIteration), open(f"/proc/{name}/status", "rb") as file:  # noqa: PTH123
                inner = next(line for line in file if line.startswith(b"NSpid:")).split()[1:]
                # One number only means a process of this pid namespace itself, such as the machine's init.
                if len(inner) > 1 and inner[-1] == b"1":
                    yield int(name)


def _box(mounts: Path) -> DevicePath | None:
    """Return what is mounted as the box in a mount namespace; None if it has none."""
    for line in mounts.read_text().splitlines():
        _, _, device, root, mount_point, *_ = line.split()
        # A device and a path on it: the path of the mount point on the host does not show in another mount namespace.
        if mount_point == BOX:
            return device, root
    return None


def _device_path(folder: Path) -> DevicePath:
    """Return the device and the path on it of a directory."""
    # mountinfo escapes these characters in octal (proc(5)).
    folder = Path(str(folder).replace("\\", "\\134").replace(" ", "\\040"))
    depth, path = 0, ("", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, device, root, at, *_ = line.split()
        # The deepest mount point holds the directory; of mounts at the same point, the last one is on top.
        if folder.is_relative_to(at) and len(Path(at).parts) >= depth:
            depth, path = len(Path(at).parts), (device, str(Path(root) / folder.relative_to(at)))
    return path
