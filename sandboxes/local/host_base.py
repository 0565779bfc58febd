"""The host's own system as a base: what of it a sandbox sees. An allow-list; all else is hidden.

As root, a *mask layer* lies over `/`: empty directories and whiteouts where something is not for the sandbox. Without
root an overlay of `/` is refused: then `/usr`, `/opt` and dpkg's database are bound read-only, and `/etc` is a copy.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from sandboxes.local.layers import OPAQUE, is_whiteout

VISIBLE = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt")
"""Top folders that a sandbox sees. In `SEARCHED` ones, what not everybody may read is hidden: keys, shadow, sudoers."""
SEARCHED = ("etc", "opt", "usr/local", "usr/etc", "usr/share")
VISIBLE_STATE = (
    "dpkg",
    "python",
    "ucf",
    "sgml-base",
    "xml-core",
    "ghostscript",
    "dictionaries-common",
    "aspell",
    "git",
)
"""Of /var/lib: what installed software looks up there."""
BOUND = ("/usr", "/opt", "/var/lib/dpkg")
_EMPTY = {"proc": 0o555, "dev": 0o755, "sys": 0o555, "root": 0o700, "home": 0o755, "run": 0o755, "run/shm": 0o1777}
_EMPTY |= {"run/lock": 0o1777, "tmp": 0o1777, "srv": 0o755, "mnt": 0o755, "media": 0o755, "boot": 0o755}
_EMPTY_STATE = {"cache": 0o755, "log": 0o755, "tmp": 0o1777, "spool": 0o755, "mail": 0o775, "backups": 0o755}
_EMPTY_STATE |= {"local": 0o755, "opt": 0o755}
_OWN_TEXT = {
    "hostname": "sandbox\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "resolv.conf": "",
    "machine-id": "",
    "mtab": "",
}
_PASSING = {".pwd.lock", "adjtime", "ld.so.cache", "mtab", ".updated", "blkid.tab"}
"""Of /etc: what a machine rewrites of its own accord."""


def skeleton(target: Path) -> None:
    """Make the directories that every root needs, as the lowest layer: a base's own lie over them."""
    for name, mode in {**_EMPTY, "var": 0o755, "var/tmp": 0o1777, "etc": 0o755}.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        (target / name).chmod(mode)


def fingerprint(root: Path = Path("/")) -> bytes:
    """Return 32 bytes that change when the host's software or its settings do. 20 ms.

    Packages by dpkg's status and the folders of `/usr`; what is installed past the packages by the folders of
    `/usr/local` and `/opt`; settings by the files below `/etc`, less those that a sandbox has of its own: a host that
    rewrites its `resolv.conf` is the same host.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted({*_software(root), *_settings(root / "etc")}):
        try:
            status = path.lstat()
        except OSError:
            continue
        digest.update(
            f"{path}\0{status.st_mtime_ns}\0{status.st_size}\0{status.st_mode}\0".encode(errors="surrogateescape")
        )
    for name in ("etc/os-release", "usr/lib/os-release"):
        if (root / name).is_file():
            digest.update((root / name).read_bytes())
    return digest.digest()


def _software(root: Path) -> Iterator[Path]:
    yield root / "var/lib/dpkg/status"
    yield from _folders(root / "usr", 1)
    yield from _folders(root / "usr/local", 4)
    yield from _folders(root / "opt", 3)


def _folders(top: Path, depth: int) -> Iterator[Path]:
    yield top
    if depth and top.is_dir() and not top.is_symlink():
        with os.scandir(top) as entries:
            for entry in entries:
                # What not everybody may read, no sandbox sees.
                if entry.is_dir(follow_symlinks=False) and _everybody_reads(Path(entry.path)):
                    yield from _folders(Path(entry.path), depth - 1)


def _settings(etc: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(etc):
        own = _OWN_TEXT.keys() | _PASSING if folder == str(etc) else set()
        for name in files:
            if name not in own:
                yield Path(folder) / name


def build_mask(target: Path, hidden: list[Path]) -> None:
    """Write the mask layer that lies over `/`. Needs root. hidden: more paths that nobody in a sandbox sees. 0.3 s."""
    host = Path("/")
    for path in host.iterdir():
        if path.name not in VISIBLE and path.name not in {"var", *_EMPTY}:
            _whiteout(target / path.name)
    _copy_facts(host, target)
    for name, mode in _EMPTY.items():
        _empty(target / name, mode)
    _mask_var(host / "var", target / "var")
    for name in SEARCHED:
        _mask_unreadable(host / name, target / name, target)
    for path in hidden:
        if path.parts[1:2] and path.parts[1] in {*VISIBLE, "var"}:
            _hide(path, target)
    _own_text(target / "etc")


def in_sight(path: Path) -> bool:
    """Whether a sandbox would see what is below path, were it not hidden."""
    seen = {(name,) for name in VISIBLE} | {("var", "lib", name) for name in VISIBLE_STATE}
    return path.parts[1:2] in seen or path.parts[1:4] in seen


def _own_text(folder: Path) -> None:
    for name, text in _OWN_TEXT.items():
        path = folder / name
        if path.is_symlink() or path.exists() or _is_whiteout(path):
            path.unlink()
        path.write_text(text)
        path.chmod(0o644)


def _mask_var(host: Path, target: Path) -> None:
    if not host.is_dir():
        return
    target.mkdir()
    for path in host.iterdir():
        if path.name in _EMPTY_STATE:
            _empty(target / path.name, _EMPTY_STATE[path.name])
        elif path.name != "lib" and not path.is_symlink():
            _whiteout(target / path.name)
    if (host / "lib").is_dir():
        (target / "lib").mkdir()
        for path in (host / "lib").iterdir():
            if path.name not in VISIBLE_STATE:
                _whiteout(target / "lib" / path.name)
        _copy_facts(host / "lib", target / "lib")
    _copy_facts(host, target)


def _mask_unreadable(host: Path, target: Path, mask: Path) -> None:
    for folder, names, files in os.walk(host):
        for name in [*names]:
            status = (Path(folder) / name).lstat()
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o005 != 0o005:
                _hide(Path(folder) / name, mask)
                names.remove(name)
        for name in files:
            status = (Path(folder) / name).lstat()
            if not stat.S_ISLNK(status.st_mode) and not status.st_mode & 0o004:
                _hide(Path(folder) / name, mask)
    if target.is_dir():
        _copy_facts(host, target)


def _hide(path: Path, mask: Path) -> None:
    """Put a whiteout for a host path into the mask, and its parents as they are on the host."""
    inside = path.relative_to("/")
    for parent in reversed(inside.parents[:-1]):
        # In a directory that shows nothing of the host, a whiteout would itself be seen.
        if _is_whiteout(mask / parent) or _is_opaque(mask / parent):
            return
        if not (mask / parent).exists():
            (mask / parent).mkdir()
            _copy_facts(Path("/") / parent, mask / parent)
    if not os.path.lexists(mask / inside):
        _whiteout(mask / inside)


def _empty(path: Path, mode: int) -> None:
    path.mkdir(parents=True)
    path.chmod(mode)
    os.setxattr(path, OPAQUE, b"y")


def _whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def _is_whiteout(path: Path) -> bool:
    try:
        return is_whiteout(path.lstat())
    except OSError:
        return False


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, OPAQUE) == b"y"
    except OSError:
        return False


def _copy_facts(source: Path, target: Path) -> None:
    status = source.lstat()
    os.chown(target, status.st_uid, status.st_gid)
    target.chmod(stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def build_copy(target: Path) -> list[str]:
    """Write the unprivileged base: links, a copy of what everybody may read in /etc, and places for `BOUND`.

    Returns those of `BOUND` that this host has. 0.5 s, 5 MB.
    """
    skeleton(target)
    for name in VISIBLE:
        path = Path("/") / name
        if path.is_symlink():
            (target / name).symlink_to(path.readlink())
        elif path.is_dir():
            (target / name).mkdir(exist_ok=True)
    bound = [folder for folder in BOUND if Path(folder).is_dir()]
    for folder in bound:
        (target / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in _EMPTY_STATE:
        (target / "var" / name).mkdir(exist_ok=True)
    shutil.copytree("/etc", target / "etc", symlinks=True, ignore=_unreadable, dirs_exist_ok=True)
    _own_text(target / "etc")
    return bound


def _unreadable(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not _everybody_reads(Path(folder) / name)]


def _everybody_reads(path: Path) -> bool:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return True
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005 and os.access(path, os.R_OK | os.X_OK)
    return stat.S_ISREG(mode) and bool(mode & 0o004) and os.access(path, os.R_OK)
