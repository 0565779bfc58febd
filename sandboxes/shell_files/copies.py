"""The bash that runs the commands of every sandbox: copies of this machine's bash and of its libraries."""

# Theory of operation.
#
# After each call the session's shell is replaced (`guest.bash.session`). Executing bash and loading its libraries takes
# a millisecond of CPU, which is more than the rest of a small call. So the anchor is a bash that has been loaded and
# stops before its first statement, and each shell is a fork of it (`linux/anchor.c`). No two shells share anything that
# bash has ever read or computed.
#
# It is this machine's bash in sandboxes of every base. So sessions are the same everywhere, also in an image that has
# another bash, or none, or no program at all.
#
# 1. The anchor stays when a sandbox moves to other layers, so it may hold no file of a layer. Therefore it is loaded
#    from copies, which each sandbox has read-only at /dev/.shell. The copy of bash has the path of its loader changed,
#    and that loader reads no list of libraries to preload. An overlay of its own shows the copies to each sandbox.
# 2. A library runs code of its own when it is loaded. In the anchor that code would go on after the layers were sealed.
#    The libraries here are this machine's, and no command can change them.
# 3. Without a compiler there is no library to load, and on some machines no copies can be made. Then the anchor is the
#    sandbox's own bash, which executes shells (`guest.anchors.bash_anchor`), and a base without bash is refused.

import contextlib
import hashlib
import logging
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from sandboxes.linux import spawn
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.rights import held
from sandboxes.shell_files.programs import MalformedError, library_path, read_program

_CACHE, _PRELOADS = "/etc/ld.so.cache", "/etc/ld.so.preload"
"""What the loader reads besides programs and libraries (ld.so(8))."""
_MAX_FILE_BYTES = 32 << 20
"""The largest file that is copied; bash and glibc have 1 to 2 MB. Without it, a base could fill memory and disk."""
_OURS = {"libanchor.so", "digest"}
"""The names of our own files, which no copy may have."""
_log = logging.getLogger(__name__)
_MAX_LIBRARIES = 8
"""The most libraries of a bash. Debian's needs two."""


class NoShellFilesError(Exception):
    """The copies cannot be made. The text says why."""


@dataclass(frozen=True, slots=True)
class ShellFiles:
    """The copies."""

    folder: str  # The directory of `files` and `empty`.
    digest: str  # A digest of the copies, which a checkpoint names.


def made_or_none(folder: Path) -> ShellFiles | None:
    """Make the copies anew; None if that is impossible."""
    try:
        return make(folder)
    except NoShellFilesError as error:
        _log.warning(
            "each shell is executed, which takes 1.4 ms of CPU more than a fork, and images without bash are refused: "
            "%s. `forkpoint doctor` says what helps", error,
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        return None


def make(folder: Path, library: Path = Path(spawn.ANCHOR), root: str = "/") -> ShellFiles:
    """Make the files anew, in `files` below a folder; `empty` beside it is empty. NoShellFilesError if impossible."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with Opened(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
            contents = _copies(top) | {"libanchor.so": library.read_bytes()}
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(contents):
            digest.update(b"%b %d\0" % (name.encode(), len(contents[name])))
            digest.update(contents[name])
        for directory in (files := folder / "files", folder / "empty"):
            directory.mkdir(parents=True)
            # Whatever the umask is: the agent's processes may have any user.
            directory.chmod(0o755)
        # The digest comes last: it says that the others are whole.
        for name, content in {**contents, "digest": digest.hexdigest().encode()}.items():
            path = files / name
            path.write_bytes(content)
            path.chmod(0o755)
            # Sandboxes show the times, and answers must not depend on when the copies were made.
            os.utime(path, (0, 0))
        os.utime(files, (0, 0))
        held.give_to_root(folder)
    except (OSError, ValueError) as error:
        raise NoShellFilesError(str(error)) from error
    return ShellFiles(str(folder), digest.hexdigest())


def _copies(root: int) -> dict[str, bytes]:
    bash = _content(root, spawn.BASH)
    program, cache = read_program(bash), _content(root, _CACHE)
    copies = {
        "bash": program.with_loader(bash, f"{spawn.SHELL_FILES}/loader"),
        "loader": _without_preloads(_content(root, program.loader)),
    }
    waiting = list(program.needed)
    # The loader itself is one of the libraries that libc needs.
    found = {os.path.basename(program.loader)}  # noqa: PTH119 - a path within the root
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        if "/" in name or name in copies.keys() | _OURS or len(found) > _MAX_LIBRARIES:
            raise MalformedError(f"bash needs {name}")
        found.add(name)
        copies[name] = _content(root, library_path(cache, name, program.machine))
        waiting += read_program(copies[name]).needed
    with contextlib.suppress(FileNotFoundError):
        kernel.stat_in_root(root, os.fsencode(_PRELOADS))
        raise MalformedError(f"{_PRELOADS} has libraries that bash would load too")
    return copies


def _without_preloads(loader: bytes) -> bytes:
    """Return a loader that reads another list of libraries to preload, which no sandbox has."""
    name = _PRELOADS.encode() + b"\0"
    if loader.count(name) != 1:
        raise MalformedError("the loader reads its list of preloads in an unknown way")
    return loader.replace(name, f"{spawn.SHELL_FILES}/none".encode().ljust(len(name), b"\0"))


def _content(root: int, path: str) -> bytes:
    how = kernel.open_how(os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, kernel.RESOLVE_IN_ROOT)
    with Opened(kernel.openat2(root, os.fsencode(path), how)) as fd, os.fdopen(os.dup(fd), "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise MalformedError(f"{path} is no file, or has more than {_MAX_FILE_BYTES} bytes")
        return file.read(_MAX_FILE_BYTES)
