"""The layer over an image that holds what a container runtime adds to it: mount points, names, and volumes.

Every sandbox of an image has it, so it is part of the root state and no effect of a call. /etc/hosts, /etc/hostname and
/etc/resolv.conf, which a container runtime binds, are files of this layer, which calls may change like any other file.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes.local.lower_view import status_of
from sandboxes.local.service_commands import SERVICES
from sandboxes.rights import held

_FIXED_NS = 10**18
"""The modification time of what is made here, 2001-09-09, so that equal images give equal root states."""
_MOUNT_POINTS = ("proc", "sys", "dev")
_SHARED_MEMORY = "run/shm"
"""Where /dev/shm leads (`linux.mounts.SHARED_MEMORY`)."""


@dataclass(frozen=True)
class Dress:
    """What is added to an image and to those of its side services."""

    hostname: str
    services: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # Further names of the sandbox itself.
    volumes: tuple[str, ...] = ()  # The directories that the images declare as volumes, as paths of the sandbox.

    @property
    def texts(self) -> dict[str, str]:
        """The files of /etc, by name."""
        # All services and the main image share one loopback, so each name is another name of it.
        names = [*(["main"] if self.services else []), *self.services, *self.aliases]
        more = f"127.0.0.1 {' '.join(names)}\n" if names else ""
        hosts = f"127.0.0.1 localhost {self.hostname}\n::1 localhost ip6-localhost ip6-loopback\n{more}"
        return {"hostname": f"{self.hostname}\n", "hosts": hosts, "resolv.conf": ""}


def build(dress: Dress, lowers: Sequence[str], target: Path) -> None:
    """Write the layer over the directories of the images, the topmost first, into an empty directory."""
    if dress.services:
        # A process of the main image that is not root finds no files of the services.
        _folder(lowers, target, SERVICES.strip("/"), 0o700)
    for root in ("", *(f"{SERVICES.strip('/')}/{name}/" for name in dress.services)):
        _dress(dress, lowers, target, root)
    _file(target / ".dockerenv", "", 0o755)
    for volume in dress.volumes:
        _folder(lowers, target, volume, 0o755)
    held.give_to_root(target)
    # The attributes of a directory in this layer are those that the sandbox shows (overlayfs.rst). Making an entry has
    # changed the time of its directory, so these come last, from the innermost upwards.
    for folder in sorted((path for path in target.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True):
        _take_facts(lowers, target, str(folder.relative_to(target)))
    _take_facts(lowers, target, "")


def _dress(dress: Dress, lowers: Sequence[str], target: Path, root: str) -> None:
    for name in _MOUNT_POINTS:
        _folder(lowers, target, f"{root}{name}", 0o755)
    _folder(lowers, target, f"{root}{_SHARED_MEMORY}", 0o1777)
    if _folder(lowers, target, f"{root}etc", 0o755):
        for name, text in dress.texts.items():
            _file(target / f"{root}etc" / name, text, 0o644)
        if status_of(lowers, f"{root}etc/mtab") is None:
            link = target / f"{root}etc/mtab"
            link.symlink_to("/proc/mounts")
            os.utime(link, ns=(_FIXED_NS, _FIXED_NS), follow_symlinks=False)


def _folder(lowers: Sequence[str], target: Path, name: str, mode: int) -> bool:
    """Make a directory in the layer, with those that it is in; return False if the image has something else there."""
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        return False
    path = Path()
    for part in parts:
        path /= part
        there = status_of(lowers, str(path))
        if there is not None and not stat.S_ISDIR(there.st_mode):
            # A link, mostly: its target is not looked for, because it may lead anywhere.
            return False
        if not (target / path).is_dir():
            (target / path).mkdir()
            (target / path).chmod(mode if str(path) == "/".join(parts) else 0o755)
    return True


def _file(path: Path, text: str, mode: int) -> None:
    path.write_text(text)
    path.chmod(mode)
    os.utime(path, ns=(_FIXED_NS, _FIXED_NS))


def _take_facts(lowers: Sequence[str], target: Path, name: str) -> None:
    path, there = target / name, status_of(lowers, name)
    if there is None:
        os.utime(path, ns=(_FIXED_NS, _FIXED_NS))
        return
    if held.over_files():
        os.chown(path, there.st_uid, there.st_gid)
    path.chmod(stat.S_IMODE(there.st_mode))
    os.utime(path, ns=(there.st_mtime_ns, there.st_mtime_ns))
