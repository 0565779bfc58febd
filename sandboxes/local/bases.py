"""Bases: what lies below everything a sandbox writes, and the digest that says which system it is."""

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

_CHUNK = 1 << 20
_LINKS_FOLLOWED = 40


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
        self.sources = SourceDigests()
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
        return self._known.get(name) or self.refresh(name)

    def refresh(self, name: str) -> Base:
        """Return the base that a spec calls name: "host", or the path of a directory or tarball, as it is now.

        Raises:
            SpecError: it is not there, cannot be read, or has no /bin/bash.
        """
        try:
            self._known[name] = self._host() if name == "host" else self._named(Path(name))
            return self._known[name]
        except (OSError, tarfile.TarError) as error:
            raise_machine_error(error)
            raise SpecError(
                f"base {name!r} cannot be used: {error}. Name a directory or tarball that this proxy can read."
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
            folder, identity = path, f"directory:{directory_digest(path)}"
        else:
            digest = self.sources.of_file(path)
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


def _check_bash(folder: Path, named: Path) -> None:
    if not _exists_inside(folder, "bin/bash"):
        raise SpecError(
            f"base {str(named)!r} has no /bin/bash. Use a root file system with bash, such as debootstrap's minbase."
        )


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
