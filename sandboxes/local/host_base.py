"""The host's own system as a base. An allow-list says what a sandbox sees of it; everything else is hidden.

With root, a *mask layer* lies over the host's root: empty directories, and whiteouts over what a sandbox must not see.
Without root, the kernel refuses an overlay of `/`. Then `/usr`, `/opt` and dpkg's database are bound read-only, and
`/etc` is a copy of what everybody may read.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandboxes.host.source_walk import CHANGES, MODIFY
from sandboxes.linux.file_copy import OPAQUE, is_opaque, is_whiteout
from sandboxes.rights import held

Watch = Callable[[str, int], None]
"""Watches a directory for events, by its path and inotify's mask."""

VISIBLE = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt")
"""Top-level directories that a sandbox sees."""

SEARCHED = ("etc", "opt", "usr/local", "usr/etc", "usr/share")
"""Directories in which files that not everybody may read are hidden: keys, shadow, sudoers."""

VISIBLE_STATE = (
    "dpkg", "python", "ucf", "sgml-base", "xml-core", "ghostscript", "dictionaries-common", "aspell", "git",
)  # fmt: skip
"""Directories of /var/lib that a sandbox sees, because installed software reads them."""

BOUND = ("/usr", "/opt", "/var/lib/dpkg")
"""Directories that are bound read-only without root."""

_EMPTY = {"proc": 0o555, "dev": 0o755, "sys": 0o555, "root": 0o700, "home": 0o755, "run": 0o755, "run/shm": 0o1777}
_EMPTY |= {"run/lock": 0o1777, "tmp": 0o1777, "srv": 0o755, "mnt": 0o755, "media": 0o755, "boot": 0o755}
"""Directories that are empty in a sandbox, with their modes."""

_EMPTY_STATE = {"cache": 0o755, "log": 0o755, "tmp": 0o1777, "spool": 0o755, "mail": 0o775, "backups": 0o755}
_EMPTY_STATE |= {"local": 0o755, "opt": 0o755}
"""Directories of /var that are empty in a sandbox, with their modes."""

_OWN_TEXT = {
    "hostname": "sandbox\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "resolv.conf": "",
    "machine-id": "",
    "mtab": "",
}
"""Files of /etc with a content of our own, because the host's depends on the machine or changes by itself."""

_PASSING = {".pwd.lock", "adjtime", "ld.so.cache", "mtab", ".updated", "blkid.tab"}
"""Files of /etc that a machine rewrites by itself, so they do not change the fingerprint."""


def skeleton(target: Path) -> None:
    """Make the directories that every root needs, as the lowest layer: a base's own directories replace them."""
    for name, mode in {**_EMPTY, "var": 0o755, "var/tmp": 0o1777, "etc": 0o755}.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        (target / name).chmod(mode)
    held.give_to_root(target)
    _fix_times(target, "var", "etc")


def fingerprint(watch: Watch = lambda _path, _events: None, root: Path = Path("/")) -> bytes:
    """Return 32 bytes that change when the host's software or settings change; `watch` gets what counts before a look.

    Packages show in dpkg's status and `/usr`, other software in `/usr/local` and `/opt`. Settings are the files below
    `/etc`, without those that a sandbox has with its own content: a host that rewrites its `resolv.conf` stays the same
    base.
    """
    digest = hashlib.blake2b(digest_size=32)
    etc = str(root / "etc")
    # Times and sizes stand for contents: reading all files of /usr would take minutes at each start. As strings, which
    # are looked at in a third of the time of paths as objects; in the order that those have.
    for path in sorted({*_software(root, watch), *_settings(etc, watch)}, key=lambda path: path.split("/")):
        try:
            status = os.lstat(path)
        # The file was removed between listing and looking, as package managers do with their temporary files.
        except OSError:
            continue
        digest.update(
            f"{path}\0{status.st_mtime_ns}\0{status.st_size}\0{status.st_mode}\0".encode(errors="surrogateescape")
        )
    # By content, because an upgrade may replace it by a file of the same size with an old time.
    for name in ("etc/os-release", "usr/lib/os-release"):
        if (root / name).is_file():
            digest.update((root / name).read_bytes())
    return digest.digest()


def _software(root: Path, watch: Watch) -> Iterator[str]:
    # The file is replaced by another one of its name, so its directory is watched.
    watch(str(root / "var/lib/dpkg"), CHANGES)
    yield str(root / "var/lib/dpkg/status")
    for name, depth in (("usr", 1), ("usr/local", 4), ("opt", 3)):
        yield from _folders(str(root / name), depth, watch)


def _folders(top: str, depth: int, watch: Watch) -> Iterator[str]:
    # Of a directory only its own time and mode count, so writes to its files are no changes.
    watch(top, CHANGES & ~MODIFY)
    yield top
    if depth and Path(top).is_dir() and not Path(top).is_symlink():
        # Adding or removing a file changes the time of its directory, so the directories suffice.
        with os.scandir(top) as entries:
            for entry in entries:
                # Sandboxes do not see what not everybody may read.
                if entry.is_dir(follow_symlinks=False) and _everybody_reads(entry.path):
                    yield from _folders(entry.path, depth - 1, watch)


def _settings(etc: str, watch: Watch) -> Iterator[str]:
    watch(etc, CHANGES)
    for folder, names, files in os.walk(etc):
        for name in names:
            # Before os.walk lists it.
            watch(f"{folder}/{name}", CHANGES)
        # Only at the top: a file of such a name in a subdirectory is a setting like any other.
        own = _OWN_TEXT.keys() | _PASSING if folder == etc else set()
        yield from (f"{folder}/{name}" for name in files if name not in own)


def build_mask(target: Path, hidden: list[Path]) -> None:
    """Write the mask layer, which hides some paths of the host's root; this takes rights over files (`rights.held`)."""
    host = Path("/")
    for path in host.iterdir():
        # An allow-list: a directory that an administrator adds to `/` tomorrow is hidden without a change here.
        if path.name not in VISIBLE and path.name not in {"var", *_EMPTY}:
            _whiteout(target / path.name)
    for name, mode in _EMPTY.items():
        _empty(target / name, mode)
    _mask_var(host / "var", target / "var")
    for name in SEARCHED:
        _mask_unreadable(host / name, target / name, target)
    # After the walk above, which makes directories of the mask in which these whiteouts lie.
    for path in hidden:
        if path.parts[1:2] and path.parts[1] in {*VISIBLE, "var"}:
            _hide(path, target)
    # Last, because `_mask_unreadable` may have hidden one of these files with a whiteout.
    _own_text(target / "etc")
    # Before directories get the host's owners, one of which may be this process's user.
    held.give_to_root(target)
    # A directory of the upper layer gives the merged directory its attributes (overlayfs.rst), so the host's are
    # copied.
    for folder, _, _ in os.walk(target):
        path = Path(folder)
        if not is_opaque(path):
            _copy_attributes(host / path.relative_to(target), path)
    _fix_times(target)


def in_sight(path: Path) -> bool:
    """Return whether sandboxes would see what is below a path if it were not hidden."""
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
        _copy_attributes(host / "lib", target / "lib")
    _copy_attributes(host, target)


def _mask_unreadable(host: Path, target: Path, mask: Path) -> None:
    for path in _unreadable(str(host)):
        _hide(Path(path), mask)
    if target.is_dir():
        _copy_attributes(host, target)


def _unreadable(top: str) -> Iterator[str]:
    """Yield what not everybody may read below a directory, but for what is hidden with its directory.

    The sandbox's root has DAC_OVERRIDE, so modes would not keep it from reading the host's keys.
    """
    # By `scandir`: tens of thousands of files are looked at, and paths as objects would take most of the time.
    pending = [top]
    while pending:
        # Other errors end the build: what cannot be listed cannot be hidden.
        with contextlib.suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:
                    continue
                needed = 0o005 if stat.S_ISDIR(mode) else 0o004
                if mode & needed != needed:
                    yield entry.path
                elif stat.S_ISDIR(mode):
                    pending.append(entry.path)


def _hide(path: Path, mask: Path) -> None:
    """Put a whiteout over a path of the host into the mask, with copies of its parents' attributes."""
    inside = path.relative_to("/")
    # From the top downwards: a parent has to exist in the mask before its child, and a hidden parent hides all below
    # it.
    for parent in reversed(inside.parents[:-1]):
        # In an opaque directory nothing of the host shows, and a whiteout itself would be visible as a device.
        if _is_whiteout(mask / parent) or is_opaque(mask / parent):
            return
        if not (mask / parent).exists():
            (mask / parent).mkdir()
            _copy_attributes(Path("/") / parent, mask / parent)
    if not os.path.lexists(mask / inside):
        _whiteout(mask / inside)


def _empty(path: Path, mode: int) -> None:
    path.mkdir(parents=True)
    path.chmod(mode)
    # Without this mark the merged directory would show the host's entries (overlayfs.rst, "whiteouts and opaque
    # directories").
    os.setxattr(path, OPAQUE, b"y")


def _whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def _is_whiteout(path: Path) -> bool:
    try:
        return is_whiteout(path.lstat())
    except OSError:
        return False


def _fix_times(target: Path, *others: str) -> None:
    """Give the root, and directories that show nothing of the host's, a time that is the same on every machine."""
    # A state's digest is relative to its base, and a layer has the times of the directories below it. With the time at
    # which each machine made its base, a state from another machine would differ from what was recorded there.
    for name in ("", *_EMPTY, *(f"var/{name}" for name in _EMPTY_STATE), *others):
        path = target / name
        if path.is_dir() and not path.is_symlink():
            os.utime(path, (0, 0))


def _copy_attributes(source: Path, target: Path) -> None:
    status = source.lstat()
    os.chown(target, status.st_uid, status.st_gid)
    target.chmod(stat.S_IMODE(status.st_mode))
    # Making an entry changes its directory's time, so the host's time is set after all entries.
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def build_copy(target: Path, hidden: Sequence[Path] = ()) -> None:
    """Write the base for a proxy without root."""
    skeleton(target)
    for name in VISIBLE:
        path = Path("/") / name
        if path.is_symlink():
            (target / name).symlink_to(path.readlink())
        elif path.is_dir():
            (target / name).mkdir(exist_ok=True)
    for folder in BOUND:
        if Path(folder).is_dir():
            (target / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in _EMPTY_STATE:
        (target / "var" / name).mkdir(exist_ok=True)

    def unreadable(folder: str, names: list[str]) -> list[str]:
        paths = (Path(folder) / name for name in names)
        return [path.name for path in paths if path in hidden or not _everybody_reads(path)]

    # Without root this copy is what protects the host: the proxy's user can read more of /etc than everybody may.
    shutil.copytree("/etc", target / "etc", symlinks=True, ignore=unreadable, dirs_exist_ok=True)
    _own_text(target / "etc")
    # Its own files came after its attributes.
    shutil.copystat("/etc", target / "etc")
    _fix_times(target, "var")


def _everybody_reads(path: Path | str) -> bool:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return True
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005 and os.access(path, os.R_OK | os.X_OK)
    return stat.S_ISREG(mode) and bool(mode & 0o004) and os.access(path, os.R_OK)
