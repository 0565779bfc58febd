"""The files of the shell that a local sandbox's anchor forks: copies of a base's bash and of its libraries."""

# Theory of operation.
#
# After each call the session's shell is replaced (`guest.bash.session`). Executing bash and loading its libraries takes
# a millisecond of CPU, which is more than the rest of a small call. So the anchor is a bash that has been loaded and
# stops before its first statement, and each shell is a fork of it (`linux/preloaded.c`). No two shells share anything
# that bash has ever read or computed.
#
# 1. The anchor stays when a sandbox moves to other layers, so it may hold no file of a layer. Therefore it is loaded
#    from copies, which each sandbox has read-only at /dev/.shell. The copy of bash has the path of its loader changed,
#    and that loader reads no list of libraries to preload. An overlay of its own shows the copies to each sandbox: a
#    lock or a watch of one sandbox's processes on these files is not one on the files of another sandbox.
# 2. A base may be anybody's, and a library runs code of its own when it is loaded. In the anchor that code would go on
#    after the layers were sealed. So bash is only loaded from files that equal this machine's byte by byte,
#    unless the operator trusts all bases. In sandboxes of other bases the anchor is a program of ours, which executes
#    their bash. What a base holds is read as data, within its root.
# 3. A command may have changed bash, its libraries or what its loader reads. `facts` has the size and the times of all
#    these files in the base. The anchor compares them before each fork, and executes the sandbox's own bash if they
#    differ. The time of change (ctime) cannot be set by a command.
# 4. Without a compiler there is no library to load, and on some machines no copies can be made. Then shells are
#    executed in all sandboxes (`guest.anchors`).

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from sandboxes.linux import spawn
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.shell_files import facts as shell_facts
from sandboxes.shell_files.programs import MalformedError, library_path, read_program

_CACHE, _PRELOADS = "/etc/ld.so.cache", "/etc/ld.so.preload"
"""What the loader reads besides programs and libraries (ld.so(8))."""
_MAX_FILE_BYTES = 32 << 20
"""The largest file that is copied; bash and glibc have 1 to 2 MB. Without it, a base could fill memory and disk."""
_MAX_COPIES = 64
"""How many different copies are kept, of 4 MB each. They stay until the driver is closed, because sandboxes show them.
After so many versions of bash, shells of another one are executed. The value is an estimate."""
_MAX_BASES = 1024
"""How many bases are remembered. One that was forgotten is read again, for 20 ms. The value is an estimate."""
_OURS = {"preloaded.so", "facts", "digest"}
"""The names of our own files, which no copy may have."""
_MAX_LIBRARIES = 8
"""The most libraries of a bash. Debian's needs two; `files` in preloaded.c has room for 32."""


class NoShellFilesError(Exception):
    """Shells of a base cannot be forked. The text says why."""


@dataclass(frozen=True, slots=True)
class ShellFiles:
    """The copies of one base.

    Attributes:
        folder: The directory of `files` and `empty`.
        digest: A digest of the copies, which a checkpoint names.
    """

    folder: str
    digest: str


class ShellCopies:
    """The copies of all bases of a driver, made when a base is first used.

    Attributes:
        last: The directory of those that were used last, which are shown in spares; empty if there are none.
    """

    def __init__(self, folder: Path, *, trust_bases: bool = False) -> None:
        """Have no copies yet; `open` removes what another process has made.

        Args:
            folder: Where they are made.
            trust_bases: Whether bases may have another bash than this machine.
        """
        self._folder, self._trust_bases = folder, trust_bases
        self.last = ""
        self._of_bases: dict[str, ShellFiles | None] = {}
        self._made: dict[bytes, ShellFiles] = {}
        self._making = asyncio.Lock()

    def open(self) -> None:
        """Remove what an earlier process has made. Its sandboxes are gone."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def of(self, identity: str, root: str | None) -> ShellFiles | None:
        """Return the copies of a base. The first time takes 20 ms, in a thread.

        Args:
            identity: What the base is; another one after a change.
            root: Its directory; None if no directory has all of it.

        Returns:
            None if shells are executed in sandboxes of this base.
        """
        if root is None:
            return None
        if identity not in self._of_bases:
            async with self._making:
                if identity not in self._of_bases:
                    made = await asyncio.to_thread(self._make_for, root)
                    if len(self._of_bases) >= _MAX_BASES:
                        self._of_bases.pop(next(iter(self._of_bases)))
                    self._of_bases[identity] = made
        if (made := self._of_bases[identity]) is not None:
            self.last = made.folder
        return made

    def _make_for(self, root: str) -> ShellFiles | None:
        if root == "/" or self._trust_bases:
            return self._make(root)
        # Looked at each time, because this machine's bash may be another one by now.
        own = self._make("/")
        return None if own is None else self._make(root, own.digest)

    def _make(self, root: str, wanted: str | None = None) -> ShellFiles | None:
        """Return the copies of a directory's bash: those that are there if they are the same.

        Args:
            root: The directory.
            wanted: The only digest of copies that are kept; None for any.
        """
        folder = self._folder / secrets.token_hex(8)
        try:
            digest = make(folder, root=root)
        except NoShellFilesError:
            # Shells are executed then, which takes longer and is otherwise the same.
            shutil.rmtree(folder, ignore_errors=True)
            return None
        key = (folder / "files" / "facts").read_bytes() + digest.encode()
        if wanted not in (None, digest) or key in self._made or len(self._made) >= _MAX_COPIES:
            shutil.rmtree(folder, ignore_errors=True)
            return self._made.get(key)
        self._made[key] = ShellFiles(str(folder), digest)
        return self._made[key]


def make(folder: Path, library: Path = Path(spawn.PRELOADED), root: str = "/") -> str:
    """Make the files anew, in `files` below a folder; `empty` beside it is empty. Return a digest of them. 10 ms.

    Args:
        folder: It is made anew.
        library: What `preloaded.c` was compiled into.
        root: The directory of the base.

    Raises:
        NoShellFilesError: They cannot be made for this base. The folder is then missing or of no use.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with Opened(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
            contents, paths = _copies(top)
            facts = shell_facts.facts_of([os.fsencode(path) for path in paths], within=top)
            if (contents, paths) != _copies(top):
                raise NoShellFilesError("bash was replaced while it was read")
        contents |= {"preloaded.so": library.read_bytes()}
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(contents):
            digest.update(b"%b %d\0" % (name.encode(), len(contents[name])))
            digest.update(contents[name])
        for directory in (files := folder / "files", folder / "empty"):
            directory.mkdir(parents=True)
            # Whatever the umask is: the agent's processes may have any user.
            directory.chmod(0o755)
        # The digest comes last: it says that the others are whole.
        for name, content in {**contents, "facts": facts, "digest": digest.hexdigest().encode()}.items():
            path = files / name
            path.write_bytes(content)
            path.chmod(0o755)
            # Sandboxes show the times, and answers must not depend on when the copies were made.
            os.utime(path, (0, 0))
        os.utime(files, (0, 0))
    except (OSError, ValueError) as error:
        raise NoShellFilesError(str(error)) from error
    return digest.hexdigest()


def _copies(root: int) -> tuple[dict[str, bytes], list[str]]:
    """Return the copies by name, and the paths of all files that loading bash involves.

    Raises:
        MalformedError, OSError: They cannot be made.
    """
    bash = _content(root, spawn.BASH)
    program, cache = read_program(bash), _content(root, _CACHE)
    copies = {
        "bash": program.with_loader(bash, f"{spawn.SHELL_FILES}/loader"),
        "loader": _without_preloads(_content(root, program.loader)),
    }
    paths, waiting = [spawn.BASH, program.loader], list(program.needed)
    # The loader itself is one of the libraries that libc needs.
    found = {os.path.basename(program.loader)}  # noqa: PTH119 - a path within the base
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        if "/" in name or name in copies.keys() | _OURS or len(found) > _MAX_LIBRARIES:
            raise MalformedError(f"bash needs {name}")
        found.add(name)
        path = library_path(cache, name, program.machine)
        copies[name] = _content(root, path)
        waiting += read_program(copies[name]).needed
        paths.append(path)
    with contextlib.suppress(FileNotFoundError):
        kernel.stat_in_root(root, os.fsencode(_PRELOADS))
        raise MalformedError(f"{_PRELOADS} has libraries that bash would load too")
    return copies, [*paths, _CACHE, _PRELOADS]


def _without_preloads(loader: bytes) -> bytes:
    """Return a loader that reads another list of libraries to preload, which no sandbox has."""
    name = _PRELOADS.encode() + b"\0"
    if loader.count(name) != 1:
        raise MalformedError("the loader reads its list of preloads in an unknown way")
    return loader.replace(name, f"{spawn.SHELL_FILES}/none".encode().ljust(len(name), b"\0"))


def _content(root: int, path: str) -> bytes:
    """Return the content of a file within a base."""
    how = kernel.open_how(os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, kernel.RESOLVE_IN_ROOT)
    with Opened(kernel.openat2(root, os.fsencode(path), how)) as fd, os.fdopen(os.dup(fd), "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise MalformedError(f"{path} is no file, or has more than {_MAX_FILE_BYTES} bytes")
        return file.read(_MAX_FILE_BYTES)
