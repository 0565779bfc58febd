"""Bases: what lies below everything a sandbox writes, and the digest that says which system it is."""

import errno
import hashlib
import os
import stat
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import SpecError
from sandboxes.linux.files import remove_tree
from sandboxes.local import host_base as hostbase

_CHUNK = 1 << 20
_LINKS_FOLLOWED = 40
_MACHINE_S = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors that say nothing about what a spec names."""


@dataclass(frozen=True, slots=True)
class Base:
    """lowers: directories, topmost first, at least two. binds: host folders shown read-only at their own path."""

    identity: str
    lowers: tuple[str, ...]
    binds: tuple[str, ...] = ()


class Bases:
    """The bases of one data directory. Methods block: run them in a thread. Each base is made once, then found."""

    def __init__(self, data_dir: Path, *, privileged: bool) -> None:
        self._data = data_dir
        self._folder = data_dir / "bases"
        self.host_view = data_dir / "host"
        """Where the launcher, and nobody else, sees the host's root: below it, at `root`."""
        self._privileged = privileged
        self._making = threading.Lock()
        self._hashes: dict[tuple[str, int, int], str] = {}
        self._known: dict[str, Base] = {}

    def open(self) -> None:
        """Make the directory, and remove what was half made."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.host_view.mkdir(exist_ok=True)
        for left in self._folder.glob("*.part"):
            remove_tree(left)
        self._make("skeleton-1", hostbase.skeleton)

    def base(self, name: str) -> Base:
        """Return the base that a spec calls name, as it was when it was last looked at."""
        return self._known.get(name) or self.look_again(name)

    def look_again(self, name: str) -> Base:
        """Return the base that a spec calls name: "host", or the path of a directory or tarball, as it is now.

        Raises:
            SpecError: it is not there, cannot be read, or has no /bin/bash.
        """
        try:
            self._known[name] = self._host() if name == "host" else self._named(Path(name))
            return self._known[name]
        except (OSError, tarfile.TarError) as error:
            _raise_if_machine(error)
            raise SpecError(
                f"base {name!r} cannot be used: {error}. Name a directory or tarball that this proxy can read."
            ) from error

    def archive_identity(self, source: Path) -> str:
        """Return a digest of a directory's or tarball's content.

        Raises:
            SpecError: it is not there or cannot be read.
        """
        try:
            return _walk_digest(source) if source.is_dir() else self._file_digest(source)
        except OSError as error:
            _raise_if_machine(error)
            raise SpecError(
                f"{str(source)!r} cannot be read: {error.strerror}. Name a tarball, directory or database."
            ) from error

    def _host(self) -> Base:
        # Where the data lies says something of the base only if a hole is left there; else trees travel.
        hole = str(self._data).encode() if hostbase.in_sight(self._data) else b""
        identity = hashlib.blake2b(hostbase.fingerprint() + hole, digest_size=16).hexdigest()
        if self._privileged:
            mask = self._make(f"mask-{identity}", lambda target: hostbase.build_mask(target, [self._data]))
            return Base(f"host:{identity}", (str(mask), str(self.host_view / "root")))
        copy = self._make(f"host-{identity}", hostbase.build_copy)
        binds = tuple(folder for folder in hostbase.BOUND if Path(folder).is_dir())
        return Base(f"host-user:{identity}", (str(copy), self._skeleton), binds)

    @property
    def _skeleton(self) -> str:
        return str(self._folder / "skeleton-1")

    def _named(self, path: Path) -> Base:
        if path.is_dir():
            folder, identity = path, f"directory:{_walk_digest(path)}"
        else:
            digest = self._file_digest(path)
            folder, identity = self._make(f"tar-{digest}", lambda target: _unpack(path, target)), f"tar:{digest}"
        _check_bash(folder, path)
        return Base(identity, (str(folder.resolve()), self._skeleton))

    def _make(self, name: str, build: Callable[[Path], object]) -> Path:
        """Return the directory name, built first where it is missing; whole or not at all."""
        target = self._folder / name
        with self._making:
            if not target.is_dir():
                part = self._folder / f"{name}.part"
                remove_tree(part)
                part.mkdir()
                build(part)
                part.rename(target)
        return target

    def _file_digest(self, path: Path) -> str:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "neither a directory nor a regular file")
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in self._hashes:
            with path.open("rb") as file:
                self._hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._hashes[key]


def _walk_digest(root: Path) -> str:
    """Digest path, size, mtime and mode of all below root: 5 us an entry."""
    digest = hashlib.blake2b(digest_size=16)
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)  # noqa: PTH118 - a hundred thousand times
            status = os.lstat(path)
            facts = (os.path.relpath(path, root), status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid)
            digest.update(repr(facts).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _check_bash(folder: Path, named: Path) -> None:
    if not _exists_inside(folder, "bin/bash"):
        raise SpecError(
            f"base {str(named)!r} has no /bin/bash. Use a root file system with bash, such as debootstrap's minbase."
        )


def _raise_if_machine(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in _MACHINE_S:
        raise error


def _exists_inside(root: Path, name: str) -> bool:
    """Whether name exists, with links read as seen from inside root."""
    parts, here = name.split("/"), Path()
    for _ in range(_LINKS_FOLLOWED):
        if not parts:
            return (root / here).is_file()
        part = parts.pop(0)
        if part in {"", "."}:
            continue
        here = here.parent if part == ".." else here / part
        if (root / here).is_symlink():
            link = str((root / here).readlink())
            parts = [*link.split("/"), *parts]
            here = Path() if link.startswith("/") else here.parent
    return False


def _unpack(source: Path, target: Path) -> None:
    """Unpack a root file system; members that would leave target are refused, device nodes left out."""

    def whole(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        checked = tarfile.tar_filter(member, folder)
        if member.isdev():
            return None
        # The filter checks where a member goes, but also drops mode bits that a root file system needs: 1777, setuid.
        return checked.replace(mode=member.mode, deep=False)

    with tarfile.open(source) as archive:
        archive.extractall(target, filter=whole, numeric_owner=True)  # noqa: S202
    target.chmod(0o755)
