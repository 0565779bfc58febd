"""The mounts of a container: the keeper narrows them until everything that a call can write to is the overlay.

Docker mounts files that are not of the image (`/etc/hosts`), memory file systems (`/dev/shm`) and volumes. No delta
would show what a call writes there, and no snapshot would hold it. So these mounts are removed or become read-only,
before any process of the agent runs.
"""

import os
import re
from pathlib import Path

from sandboxes.container.boot_scripts import BOX, SERVICES, SHARED
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.mounts import SHARED_MEMORY, narrow_proc, remount_read_only

_KEPT = ("/proc", "/sys")
"""Mount points that stay, with all mounts below them. Docker makes them read-only where a container could do harm."""

_KEPT_EXACTLY = {"/", "/dev", "/dev/pts", BOX}
"""Mount points that stay, without the mounts below them."""

_OWN_TEXTS = {
    "/etc/hostname": "sandbox\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/resolv.conf": "",
}
"""Files of Docker's that get a fixed content, because Docker's depends on the container."""

_SERVICE = re.compile(r"[a-z][a-z0-9_-]{0,30}")
"""What a directory of a service is named. Other entries of `SERVICES` are none."""

_SHARED_CHARS = 1 << 16
"""What is read of the list of shared directories: an image may have anything there."""

_FIXED_NS = 10**18
"""The modification time of these files, 2001-09-09 in every container, so that digests of states are equal."""


def narrow(pid: int) -> None:
    """Narrow the mounts of a container. The calling process stays in its mount namespace, so it has to be a fork.

    Args:
        pid: The container's pid 1, as this machine numbers it.

    Raises:
        OSError: The kernel refuses.
    """
    # Read before setns: afterwards /proc is the container's.
    mount_points = [_unescaped(line.split()[4]) for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(namespace, kernel.CLONE_NEWNS)
    os.umask(0o022)
    # In reverse order of mounting, because a mount with others on top of it is busy.
    for path in reversed(mount_points):
        if path not in _KEPT_EXACTLY and not any(path == kept or path.startswith(f"{kept}/") for kept in _KEPT):
            kernel.unmount(path)
    # A process that is root in the container could otherwise raise its own limits, or move between groups.
    if "/sys/fs/cgroup" in mount_points:
        remount_read_only("/sys/fs/cgroup", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    # The tmpfs at /dev/shm was unmounted above; the directory below it lies in Docker's /dev, which no snapshot holds.
    _share_memory()
    services = _services()
    _write_own_texts(services)
    for path in ("/.dockerenv", "/etc/mtab"):
        # Docker makes these files when the container starts. Their times would differ in every container.
        if os.path.lexists(path):
            os.utime(path, ns=(_FIXED_NS, _FIXED_NS), follow_symlinks=False)
    for path in ("/", "/etc", "/run", *(f"{SERVICES}/{name}/etc" for name in services)):
        # What was made in these directories has changed their times.
        if os.path.isdir(path):  # noqa: PTH112
            os.utime(path, ns=(_FIXED_NS, _FIXED_NS), follow_symlinks=False)
    # Last, because the lines above still write to /dev.
    remount_read_only("/dev", kernel.MS_NOSUID)
    # Docker narrows less than local sandboxes do, and each version differs. setns has made the root the directory.
    narrow_proc()
    _mount_for(services)


def _write_own_texts(services: list[str]) -> None:
    """Write the files of fixed content, for the main image and for each service."""
    texts = _OWN_TEXTS
    if services:
        # All services and the main container share one loopback, so each name is another name of it.
        texts = texts | {"/etc/hosts": f"{_OWN_TEXTS['/etc/hosts']}127.0.0.1 main {' '.join(services)}\n"}
    for root in ("", *(f"{SERVICES}/{name}" for name in services)):
        for path, text in texts.items():
            _write(root + path, text)


def _services() -> list[str]:
    """Return the names of the side services that the container's image has files of."""
    if not os.path.isdir(SERVICES) or os.path.islink(SERVICES):  # noqa: PTH112, PTH114
        return []
    entries = os.scandir(SERVICES)
    return sorted(
        entry.name for entry in entries if _SERVICE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )


def _mount_for(services: list[str]) -> None:
    """Give each service the container's /proc, /dev and /sys as they are now, and mount the shared directories.

    All paths are looked up in the container, so a link in an image leads to its own files. The image may have written
    the list of shared directories itself, so nothing in it may lead out of the container's own files: what is masked in
    /proc would show, and be writable, in a second mount of it.
    """
    for name in services:
        for path in ("/proc", "/dev", "/sys"):
            os.makedirs(f"{SERVICES}/{name}{path}", exist_ok=True)  # noqa: PTH103
            kernel.mount(path, f"{SERVICES}/{name}{path}", "", kernel.MS_BIND | kernel.MS_REC)
    if not services or os.path.islink(SHARED) or not os.path.isfile(SHARED):  # noqa: PTH113, PTH114
        return
    with open(SHARED) as file:  # noqa: PTH123
        lines = file.read(_SHARED_CHARS).splitlines()
    for line in lines:
        source, _, target = line.partition("\t")
        kernel.bind_within_root(source, target)


def _share_memory() -> None:
    """Make /dev/shm a directory of the overlay, so that snapshots hold what is in it."""
    os.makedirs("/dev/shm", exist_ok=True)  # noqa: PTH103, S108
    os.makedirs(SHARED_MEMORY, exist_ok=True)  # noqa: PTH103
    os.chmod(SHARED_MEMORY, 0o1777)  # noqa: PTH101, S103 - as every /dev/shm has it
    kernel.mount(SHARED_MEMORY, "/dev/shm", "", kernel.MS_BIND)  # noqa: S108


def _write(path: str, text: str) -> None:
    """Replace a file by one of ours with a fixed time; an image may have it as a link, which is not followed."""
    folder = os.path.dirname(path)  # noqa: PTH120
    if not os.path.isdir(folder):  # noqa: PTH112
        return
    # Unlinked, not overwritten: the name may be a link, and its target must not be written to.
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "w") as file:  # noqa: PTH123
        file.write(text)
    os.utime(path, ns=(_FIXED_NS, _FIXED_NS))


def _unescaped(text: str) -> str:
    """Return a path of mountinfo without the octal escapes of spaces and backslashes (proc(5))."""
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")


def view(lowers: list[str], mount_point: str) -> int:
    """Return a descriptor of an image's merged root, which stays mounted nowhere.

    Args:
        lowers: The image's directories, topmost first.
        mount_point: An empty directory, which is used for a moment.
    """
    # mount(2) takes one page of options. Docker has a link with a short name for each directory, relative to its
    # storage directory, so an image with over a hundred layers fits.
    os.chdir(Path(lowers[0]).parents[1])
    options = "lowerdir=" + ":".join(_short(lower) for lower in lowers)
    if len(lowers) == 1:
        return os.open(lowers[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.mount("overlay", mount_point, "overlay", kernel.MS_RDONLY, options)
    try:
        # The descriptor keeps the file system alive after the lazy unmount below (umount2(2), MNT_DETACH). A kill -9 in
        # between leaves a mount in the launcher's private namespace only, which goes with the launcher.
        return os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        kernel.unmount(mount_point)
        os.chdir("/")


def _short(lower: str) -> str:
    """Return the short name of a directory below Docker's storage directory."""
    path = Path(lower)
    try:
        return f"l/{(path.parent / 'link').read_text().strip()}"
    except OSError:
        return f"{path.parent.name}/{path.name}"
