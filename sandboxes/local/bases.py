"""Bases: the root file systems below all layers, each with a digest that identifies it.

A base is the host itself ("host", see `host_base`), a directory, or a tarball, which is unpacked once. Under each of
them lies the *skeleton*, a layer with the directories that every root needs as mount points.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import SpecError
from sandboxes.host.source_digest import SourceDigests, raise_machine_error
from sandboxes.host.source_watch import Watched
from sandboxes.images import root_tar
from sandboxes.images.built_trees import BuiltTrees
from sandboxes.images.config import ImageError
from sandboxes.linux.plain_files import open_plain
from sandboxes.local import host_base as hostbase
from sandboxes.sources import SourceRules

_MAX_LINKS = 40
"""Limits the symlinks that one path leads through, as the kernel does (path_resolution(7))."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base.

    Attributes:
        identity: What it is, and a digest of its content.
        lowers: Its directories, the topmost first; at least two.
        binds: Directories of the host that a sandbox sees read-only, at their own paths.
        hidden: Paths in these directories that a sandbox must not see.
    """

    identity: str
    lowers: tuple[str, ...]
    binds: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def root(self) -> str | None:
        """The directory that a sandbox has as its root; None if no directory has all of it."""
        # The host in a user namespace is a copy of /etc and binds of the rest.
        if self.binds:
            return None
        return "/" if self.identity.startswith("host:") else self.lowers[0]


class Bases:
    """The bases of one data directory, each built once. Methods block: run them in a thread.

    Attributes:
        host_view: Where the launcher, in its own mounts only, has the host's root, at `root` below it.
        sources: Digests of directories and files.
    """

    def __init__(self, data_dir: Path, *, privileged: bool, rules: SourceRules | None = None) -> None:
        """Name the directories; `open` makes them.

        Args:
            data_dir: The driver's own directory.
            privileged: Whether the proxy is root, so that the host's root can be a layer.
            rules: What specs may name; its private paths are hidden from sandboxes on the host's own system.
        """
        self._data = data_dir
        self._folder = data_dir / "bases"
        self._trees = BuiltTrees(self._folder)
        self.host_view = data_dir / "host"
        self._privileged = privileged
        self._rules = rules or SourceRules()
        # Those that lie where the host base shows nothing need no hole.
        self._hidden = sorted({path for path in (data_dir, *self._rules.private) if hostbase.in_sight(path)})
        self.sources = SourceDigests()
        # The host is looked at again only after inotify has reported something.
        self._host_fingerprint = Watched(hostbase.fingerprint)
        self._known: dict[str, Base] = {}
        self._former: dict[str, set[str]] = {}

    def open(self) -> None:
        """Make the directories, and remove bases that a killed process left half built."""
        self._trees.open()
        self.host_view.mkdir(exist_ok=True)
        # The number is part of the name, so that a changed skeleton gets another directory and old states keep theirs.
        self._trees.make("skeleton-2", hostbase.skeleton)

    def base(self, name: str, *, confined: bool = False) -> Base:
        """Return a base by its name in specs, as `refresh` last saw it."""
        known = self._known.get(name)
        if known is None:
            return self.refresh(name, confined=confined)
        if name == "host":
            # Its mask hides what not everybody may read, so a new secret of the host needs a new mask.
            return known if self._host_fingerprint.known() is not None else self.refresh(name)
        # The known base, not a fresh look: the caller has just compared its identity, or compares it afterwards. Only
        # what the spec may name is looked at again.
        self._rules.real(name, confined=confined)
        return known

    def known(self, name: str) -> str | None:
        """Return the identity of a base if it is certainly unchanged since `refresh`; microseconds, no blocking."""
        base = self._known.get(name)
        content = self._host_fingerprint.known() if name == "host" else self.sources.known(name)
        return None if base is None or content is None else base.identity

    def frozen(self, name: str, identity: str, *, confined: bool = False) -> Base | None:
        """Return the base on which a state was frozen, or what a rollout there would see of it now.

        A tarball's files were unpacked for its content, so they are there as they were. The host goes on changing below
        running sandboxes, too, so a state of it comes back on the host as it is.

        Args:
            name: Its name in specs.
            identity: What the base was when the state was frozen.
            confined: Whether it must be among the allowed sources.

        Returns:
            None if it is a directory that has changed, or files that are gone.
        """
        kind, _, digest = identity.partition(":")
        # Only what this name has meant: an imported state could name any tarball that another task uses.
        if kind == "tar" and identity in self._former.get(name, ()) and (self._folder / f"tar-{digest}").is_dir():
            self._rules.real(name, confined=confined)
            return Base(identity, (str((self._folder / f"tar-{digest}").resolve()), self._skeleton))
        base = self.base(name, confined=confined)
        is_host = kind == base.identity.partition(":")[0] and kind.startswith("host")
        return base if is_host or base.identity == identity else None

    def close(self) -> None:
        """End all watches."""
        self._host_fingerprint.close()
        self.sources.directories.close()

    def refresh(self, name: str, *, confined: bool = False) -> Base:
        """Return a base as it is now.

        Args:
            name: Its name in specs: "host", or the path of a directory or tarball.
            confined: Whether it must be among the allowed sources.

        Raises:
            SpecError: It is missing, cannot be read, or has no /bin/bash.
            OSError: The machine is short of memory, descriptors or disk.
        """
        try:
            base = self._host() if name == "host" else self._named(Path(name), confined=confined)
        except (OSError, ImageError) as error:
            # A full disk is the machine's fault and stays an OSError; only the rest is the spec's.
            raise_machine_error(error)
            raise SpecError(
                f"base {name!r} cannot be used: {error}. Name a directory or tarball that this proxy can read."
            ) from error
        self._known[name] = base
        self._former.setdefault(name, set()).add(base.identity)
        return base

    def _host(self) -> Base:
        # If sandboxes would see files of the proxy's own, these are hidden, and their paths become part of the
        # identity. Otherwise the identity is the same on equal hosts, so that trees can be moved between them.
        hole = b"\0".join(os.fsencode(path) for path in self._hidden)
        identity = hashlib.blake2b(self._host_fingerprint.value() + hole, digest_size=16).hexdigest()
        if self._privileged:
            # Over the host's root: whiteouts in the mask hide what sandboxes must not see.
            mask = self._trees.make(f"mask-2-{identity}", lambda target: hostbase.build_mask(target, self._hidden))
            return Base(f"host:{identity}", (str(mask), str(self.host_view / "root")))
        copy = self._trees.make(f"host-2-{identity}", lambda target: hostbase.build_copy(target, self._hidden))
        # The kernel refuses an overlay of `/` in a user namespace, so these directories come as bind mounts.
        binds = tuple(folder for folder in hostbase.BOUND if Path(folder).is_dir())
        return Base(f"host-user:{identity}", (str(copy), self._skeleton), binds, tuple(map(str, self._hidden)))

    @property
    def _skeleton(self) -> str:
        return str(self._folder / "skeleton-2")

    def _named(self, name: Path, *, confined: bool) -> Base:
        real = Path(self._rules.real(name, confined=confined))
        # Opened once: the digest, the content and the check for bash are of the same directory or file.
        with open_plain(real) as path:
            if not path.is_dir():
                digest = self.sources.of_file(path, name=str(name))
                folder = self._trees.make(f"tar-{digest}", lambda target: root_tar.unpack(path, target), checked=True)
                _check_bash(folder, name)
                return Base(f"tar:{digest}", (str(folder.resolve()), self._skeleton))
            # A directory is used in place, so it may change at any time.
            identity = f"directory:{self.sources.of_directory(path, name=str(name), real=str(real))}"
            _check_bash(path, name)
        # The launcher opens it by this path again, without following links.
        return Base(identity, (str(real), self._skeleton))


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
