"""What the services of a compose file mount: files of the task's directory, empty directories, and shared volumes.

A sandbox has no paths of the client's machine: files are copied, and a directory to get logs out is an empty one.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forkpoint.compose_errors import ComposeFileError, Reason
from sandboxes.local.service_commands import absolute, is_system

MAX_FILES, MAX_BYTES = 256, 512 << 10
"""How many files, and how many bytes of them, a task's mounts bring along. The spec carries them. More belongs into an
image."""
_READ_ONLY = "is writable, although the file says read-only: a sandbox has no read-only mounts."


class Mount(NamedTuple):
    """A mount of a service. An anonymous volume has no source."""

    source: str
    target: str
    read_only: bool = False
    memory: bool = False

    @property
    def is_path(self) -> bool:
        """Whether the source is a path of the client's machine."""
        return "/" in self.source or self.source.startswith((".", "~", "$"))


@dataclass(slots=True)
class Mounted:
    """What the mounts of all services become, as paths in the main container."""

    files: dict[str, str] = field(default_factory=dict)  # Text by path.
    programs: set[str] = field(default_factory=set)  # Those of the files that can be executed.
    folders: set[str] = field(default_factory=set)  # Empty directories.
    memory: set[str] = field(default_factory=set)  # Directories that all users can write to, instead of a tmpfs.
    volumes: dict[str, dict[str, str]] = field(default_factory=dict)  # Path by service of each named volume.


def mounts_of(name: str, service: Mapping[str, Any]) -> list[Mount]:
    """Return the mounts of a service. Raises ComposeFileError for a kind that a sandbox does not have."""
    return [_mount(name, entry) for entry in service.get("volumes") or ()] + [
        Mount("", entry.partition(":")[0], memory=True) for entry in listed(service.get("tmpfs"))
    ]


def listed(value: Any) -> list[str]:
    """Return a member that is one text or a list of them as a list."""
    return [value] if isinstance(value, str) else [str(entry) for entry in value or ()]


def mounted(
    services: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, str],
    folder: Path | None,
    note: Callable[[str], object],
) -> Mounted:
    """Return what the mounts of services become, with the root of each as a path in the main container.

    `folder` is the compose file's; None if it is not known. `note` gets a sentence for what is not as in the file.
    Raises ComposeFileError if a service needs a path of the client's machine that cannot be copied.
    """
    result = Mounted()
    for name, service in services.items():
        for mount in mounts_of(name, service):
            target = places[name] + absolute(mount.target)
            if mount.memory:
                result.memory.add(target)
            elif not mount.source or not mount.target:
                continue
            elif mount.is_path:
                _add_path(result, name, mount, target, folder)
            else:
                result.volumes.setdefault(mount.source, {})[name] = mount.target.rstrip("/")
            if mount.read_only:
                note(f"Service {name!r}: {mount.target} {_READ_ONLY}")
    # A directory of one service needs no volume.
    result.volumes = {volume: paths for volume, paths in result.volumes.items() if len(paths) > 1}
    return result


def _add_path(result: Mounted, name: str, mount: Mount, target: str, folder: Path | None) -> None:
    source = mount.source
    if source.startswith("/") and is_system(absolute(source)):
        raise _refused(name, mount, "it is a directory of the system")
    found = None if folder is None or source.startswith("$") else folder / Path(source).expanduser()
    if found is None or not found.exists():
        if found is None and (mount.read_only or Path(source).suffix):
            raise _refused(name, mount, "a sandbox has no paths of the client's machine")
        result.folders.add(target)
        return
    assert folder is not None
    # A task's files are a stranger's: nothing but the task's own directory is copied, whatever links say.
    if found.is_dir() and not any(found.iterdir()):
        result.folders.add(target)
        return
    for file in [found, *(sorted(below(found)) if found.is_dir() else ())]:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise _refused(name, mount, "it is not in the directory of the compose file")
        path = target if file == found else f"{target}/{file.relative_to(found)}"
        if file.is_dir() and not file.is_symlink():
            result.folders.add(path)
        else:
            _add_file(result, name, mount, file, path)


def _add_file(result: Mounted, name: str, mount: Mount, file: Path, path: str) -> None:
    if not file.is_file():
        raise _refused(name, mount, f"{file.name} is no plain file")
    room = MAX_BYTES - sum(map(len, result.files.values()))
    if len(result.files) >= MAX_FILES or file.stat().st_size > room:
        raise _refused(name, mount, f"it has more than {MAX_FILES} files or {MAX_BYTES >> 10} kB")
    try:
        text = file.read_text()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise _refused(name, mount, f"{file.name} is not text")
    result.files[path] = text
    if os.access(file, os.X_OK):
        result.programs.add(path)


def below(folder: Path) -> Iterable[Path]:
    """Yield all that is below a directory. Links are not followed."""
    for at, folders, names in os.walk(folder):
        yield from (Path(at, name) for name in (*folders, *names))


def _refused(name: str, mount: Mount, why: str) -> ComposeFileError:
    return ComposeFileError(
        Reason.HOST_FILES,
        f"Service {name!r} mounts {mount.source} at {mount.target} (volumes), and it cannot be copied: {why}. Put the "
        "files into the image.",
    )


def _mount(name: str, entry: Any) -> Mount:
    if isinstance(entry, dict):
        kind = entry.get("type") or "volume"
        if kind not in {"bind", "volume", "tmpfs"}:
            raise ComposeFileError(
                Reason.HOST_FILES, f"Service {name!r} has a mount of type {kind!r} (volumes), which a sandbox has not."
            )
        target = str(entry.get("target") or "")
        if kind == "tmpfs":
            return Mount("", target, memory=True)
        return Mount(str(entry.get("source") or ""), target, bool(entry.get("read_only")))
    source, _, rest = str(entry).partition(":")
    target, _, options = rest.partition(":")
    return Mount(source, target, "ro" in options.split(","))
