"""Containers that run although Docker has forgotten them: a daemon that was killed as it started one does."""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from sandboxes.container.boot_scripts import BOX

DevicePath = tuple[str, str]
"""A device and a path on it: what a directory is called in every mount namespace."""


def kill_orphans(boxes: Path, known: Collection[str]) -> int:
    """Kill each container that has a box below boxes under a name that is not known; return how many.

    Found by the box, which Docker mounts before anything of the image runs, and which a container cannot unmount.
    Milliseconds for a hundred processes.
    """
    device, folder = _place(boxes)
    killed = 0
    for pid in _first_processes():
        try:
            process = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            box = _box(Path(f"/proc/{pid}/mountinfo"))
            if box is None or box[0] != device or not box[1].startswith(f"{folder}/"):
                continue
            if box[1].removeprefix(f"{folder}/").split("/")[0] not in known:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                killed += 1
        except OSError:
            # It has ended meanwhile.
            continue
        finally:
            os.close(process)
    return killed


def _first_processes() -> Iterator[int]:
    """Yield the first process of every pid namespace but this one."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - many
        if name.isdigit():
            with contextlib.suppress(OSError, StopIteration), open(f"/proc/{name}/status", "rb") as file:  # noqa: PTH123
                inner = next(line for line in file if line.startswith(b"NSpid:")).split()[1:]
                if len(inner) > 1 and inner[-1] == b"1":
                    yield int(name)


def _box(mounts: Path) -> DevicePath | None:
    for line in mounts.read_text().splitlines():
        _, _, device, root, place, *_ = line.split()
        if place == BOX:
            return device, root
    return None


def _place(folder: Path) -> DevicePath:
    """Return what a directory is called on its device."""
    # As the kernel writes paths there.
    folder = Path(str(folder).replace("\\", "\\134").replace(" ", "\\040"))
    depth, found = 0, ("", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, device, root, at, *_ = line.split()
        # The last of equal ones is on top.
        if folder.is_relative_to(at) and len(Path(at).parts) >= depth:
            depth, found = len(Path(at).parts), (device, str(Path(root) / folder.relative_to(at)))
    return found
