"""Bases: the root file systems below all layers, each with a digest that identifies it.

A base is the host itself ("host", see `host_base`), a directory, or a tarball, which is unpacked once. Under each of
them lies the *skeleton*, a layer with the directories that every root needs as mount points.
"""

import hashlib
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import SpecError
from sandboxes.host.source_digest import SourceDigests, directory_digest, raise_machine_error
from sandboxes.linux.files import remove_tree
from sandboxes.local import host_base as hostbase

_MAX_LINKS = 40
"""Limits the symlinks that one path leads through, as the kernel does (path_resolution(7))."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base.

    Attributes:
        identity: What it is, and a digest of its content.
        lowers: Its directories, the topmost first; at least two.
        binds: Directories of the host that a sandbox sees read-only, at their own paths.
    """

    identity: str
    lowers: tuple[str, ...]
    binds: tuple[str, ...] = ()


class Bases:
    """The bases of one data directory, each built once. Methods block: run them in a thread.

    Attributes:
        host_view: Where the launcher, in its own mounts only, has the host's root, at `root` below it.
        sources: Digests of directories and files.
    """

    def __init__(self, data_dir: Path, *, privileged: bool) -> None:
        """Name the directories; `open` makes them.

        Args:
            data_dir: The driver's own directory.
            privileged: Whether the proxy is root, so that the host's root can be a layer.
        """
        self._data = data_dir
        self._folder = data_dir / "bases"
        self.host_view = data_dir / "host"
        self._privileged = privileged
        # Methods run in threads, and two specs may name the same base at once. Only one of them builds it.
        self._making = threading.Lock()
        self.sources = SourceDigests()
        self._known: dict[str, Base] = {}

    def open(self) -> None:
        """Make the directories, and remove bases that a killed process left half built."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.host_view.mkdir(exist_ok=True)
        # A kill -9 while `_make` builds leaves a `.part`. The driver's lock is held, so no other process is building
        # here.
        for unfinished in self._folder.glob("*.part"):
            remove_tree(unfinished)
        # The number is part of the name, so that a changed skeleton gets another directory and old states keep theirs.
        self._make("skeleton-1", hostbase.skeleton)

    def base(self, name: str) -> Base:
        """Return a base by its name in specs, as `refresh` last saw it."""
        # The known base, not a fresh look: a running task keeps its base even if the host changes meanwhile.
        return self._known.get(name) or self.refresh(name)

    def refresh(self, name: str) -> Base:
        """Return a base as it is now.

        Args:
            name: Its name in specs: "host", or the path of a directory or tarball.

        Raises:
            SpecError: It is missing, cannot be read, or has no /bin/bash.
            OSError: The machine is short of memory, descriptors or disk.
        """
        try:
            self._known[name] = self._host() if name == "host" else self._named(Path(name))
            return self._known[name]
        except (OSError, tarfile.TarError) as error:
            # A full disk is the machine's fault and stays an OSError; only the rest is the spec's.
            raise_machine_error(error)
            raise SpecError(
                f"base {name!r} cannot be used: {error}. Name a directory or tarball that this proxy can read."
            ) from error

    def _host(self) -> Base:
        # If sandboxes would see the data directory, it is hidden, and its path becomes part of the identity. Otherwise
        # the identity is the same on equal hosts, so that trees can be moved between them.
        hole = str(self._data).encode() if hostbase.in_sight(self._data) else b""
        identity = hashlib.blake2b(hostbase.fingerprint() + hole, digest_size=16).hexdigest()
        if self._privileged:
            # Over the host's root: whiteouts in the mask hide what sandboxes must not see.
            mask = self._make(f"mask-{identity}", lambda target: hostbase.build_mask(target, [self._data]))
            return Base(f"host:{identity}", (str(mask), str(self.host_view / "root")))
        copy = self._make(f"host-{identity}", hostbase.build_copy)
        # The kernel refuses an overlay of `/` in a user namespace, so these directories come as bind mounts.
        binds = tuple(folder for folder in hostbase.BOUND if Path(folder).is_dir())
        return Base(f"host-user:{identity}", (str(copy), self._skeleton), binds)

    @property
    def _skeleton(self) -> str:
        return str(self._folder / "skeleton-1")

    def _named(self, path: Path) -> Base:
        if path.is_dir():
            # A directory is used in place. Its digest is computed each time, because it may change between tasks.
            folder, identity = path, f"directory:{directory_digest(path)}"
        else:
            digest = self.sources.of_file(path)
            folder, identity = self._make(f"tar-{digest}", lambda target: _unpack(path, target)), f"tar:{digest}"
        _check_bash(folder, path)
        return Base(identity, (str(folder.resolve()), self._skeleton))

    def _make(self, name: str, build: Callable[[Path], object]) -> Path:
        """Return a directory of bases; build it if it is missing, completely or not at all."""
        target = self._folder / name
        with self._making:
            if not target.is_dir():
                part = self._folder / f"{name}.part"
                remove_tree(part)
                part.mkdir()
                build(part)
                # The rename is atomic (rename(2)), so a base exists completely or not at all.
                part.rename(target)
        return target


def _check_bash(folder: Path, named: Path) -> None:
    """Refuse a root file system without bash."""
    if not _exists_inside(folder, "bin/bash"):
        raise SpecError(
            f"base {str(named)!r} has no /bin/bash. Use a root file system with bash, such as debootstrap's minbase."
        )


def _exists_inside(root: Path, name: str) -> bool:
    """Return whether a path is a file, with symlinks resolved as a process with this root resolves them."""
    parts, here = name.split("/"), Path()
    for _ in range(_MAX_LINKS):
        if not parts:
            return (root / here).is_file()
        part = parts.pop(0)
        if part in {"", "."}:
            continue
        # `here` is relative to the root, and the parent of an empty path is itself, as `/..` is `/`.
        here = here.parent if part == ".." else here / part
        if (root / here).is_symlink():
            link = str((root / here).readlink())
            parts = [*link.split("/"), *parts]
            # An absolute link starts at the base's root, not at the host's. The host's bash must not count as the
            # base's.
            here = Path() if link.startswith("/") else here.parent
    return False


def _unpack(source: Path, target: Path) -> None:
    """Unpack a root file system without its device nodes; a member that would leave the target is refused."""

    def keep_mode(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        checked = tarfile.tar_filter(member, folder)
        # A sandbox has its own /dev. A device node of the archive would give access to a device of the host.
        if member.isdev():
            return None
        # tar_filter checks paths, but it also drops mode bits that a root file system needs: 1777 and set-user-id.
        return checked.replace(mode=member.mode, deep=False)

    with tarfile.open(source) as archive:
        archive.extractall(target, filter=keep_mode, numeric_owner=True)  # noqa: S202
    target.chmod(0o755)
