"""The mounts of a container, before anything of the agent's runs in it: all that it can write to is its overlay.

Docker gives a container files that are not of its image (`/etc/hosts`), memory file systems (`/dev/shm`) and volumes.
What a call leaves there nobody would see, and no snapshot would hold. So they go, or become read-only.
"""

import os
from pathlib import Path

from sandboxes.container.boot_scripts import BOX
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.mounts import SHARED_MEMORY

_KEPT = ("/proc", "/sys")
_KEPT_EXACTLY = {"/", "/dev", "/dev/pts", BOX}
_OWN_TEXTS = {
    "/etc/hostname": "sandbox\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/resolv.conf": "",
}
_FIXED_NS = 10**18
"""The time of our own files, the same in all containers: 2001-09-09."""


def narrow(pid: int) -> None:
    """Do that in the mount namespace of a container's pid 1. For a process of its own: it does not come back.

    Raises:
        OSError: the kernel refuses.
    """
    places = [_unescaped(line.split()[4]) for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(namespace, kernel.CLONE_NEWNS)
    os.umask(0o022)
    for place in reversed(places):
        if place not in _KEPT_EXACTLY and not any(place == kept or place.startswith(f"{kept}/") for kept in _KEPT):
            kernel.unmount(place)
    if "/sys/fs/cgroup" in places:
        _read_only("/sys/fs/cgroup", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _share_memory()
    for path, text in _OWN_TEXTS.items():
        _write(path, text)
    for path in ("/.dockerenv", "/etc/mtab"):
        # Made by Docker at the container's birth, which nobody is to see.
        if os.path.lexists(path):
            os.utime(path, ns=(_FIXED_NS, _FIXED_NS), follow_symlinks=False)
    # Read-only from here on: nothing that a call leaves may live outside the overlay.
    _read_only("/dev", kernel.MS_NOSUID)


def _share_memory() -> None:
    os.makedirs("/dev/shm", exist_ok=True)  # noqa: PTH103, S108
    os.makedirs(SHARED_MEMORY, exist_ok=True)  # noqa: PTH103
    os.chmod(SHARED_MEMORY, 0o1777)  # noqa: PTH101, S103 - as every /dev/shm has it
    kernel.mount(SHARED_MEMORY, "/dev/shm", "", kernel.MS_BIND)  # noqa: S108


def _write(path: str, text: str) -> None:
    folder = os.path.dirname(path)  # noqa: PTH120
    if not os.path.isdir(folder):  # noqa: PTH112
        return
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "w") as file:  # noqa: PTH123
        file.write(text)
    os.utime(path, ns=(_FIXED_NS, _FIXED_NS))


def _read_only(path: str, flags: int) -> None:
    kernel.mount("", path, "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def _unescaped(text: str) -> str:
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")


def view(lowers: list[str], place: str) -> int:
    """Return a descriptor of what an image's directories (topmost first) show together, mounted nowhere.

    place: an empty directory, used for a moment. Docker's short names keep the options within a page.
    """
    os.chdir(Path(lowers[0]).parents[1])
    options = "lowerdir=" + ":".join(_short(lower) for lower in lowers)
    if len(lowers) == 1:
        return os.open(lowers[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.mount("overlay", place, "overlay", kernel.MS_RDONLY, options)
    try:
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        kernel.unmount(place)
        os.chdir("/")


def _short(lower: str) -> str:
    path = Path(lower)
    try:
        return f"l/{(path.parent / 'link').read_text().strip()}"
    except OSError:
        return f"{path.parent.name}/{path.name}"
