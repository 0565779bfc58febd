"""The files of the shell that a local sandbox's anchor forks: copies of the host's bash and of its libraries."""

# Theory of operation.
#
# After each call the session's shell is replaced (`guest.bash.session`). Executing bash and loading its libraries takes
# a millisecond of CPU, which is more than the rest of a small call. So the anchor is a bash that has been loaded and
# stops before its first statement, and each shell is a fork of it (`linux/preloaded.c`). No two shells share anything
# that bash has ever read or computed.
#
# 1. The anchor stays when a sandbox moves to other layers, so it may hold no file of a layer. Therefore it is loaded
#    from copies, which each sandbox has read-only at /dev/.shell. A copy of bash differs from bash in one place, the
#    path of its loader. An overlay of its own shows them to each sandbox: a lock or a watch of one sandbox's processes
#    on these files is not one on the files of another sandbox.
# 2. A sandbox may have another bash than the host, or a command may have changed bash, its libraries or what its loader
#    reads. `facts` has the size and the times of all these files. The anchor compares them before each fork, and
#    executes the sandbox's own bash if they differ. The time of change (ctime) cannot be set by a command.
# 3. Without a compiler there is no library to load, and on some hosts no copies can be made. Then the anchor is one of
#    the other programs (`guest.anchor`).

import hashlib
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

from sandboxes.linux import shell_facts, spawn

_INTERPRETER, _DYNAMIC_64_LITTLE = 3, b"\x7fELF\x02\x01"
"""The type of a program header that names the loader, and how the file of a 64-bit program begins (elf(5))."""
_HEADER = struct.Struct("=32xQ14xHH6x")
"""Of an ELF header (Elf64_Ehdr): where the program headers begin, the size of one, and how many there are."""
_PROGRAM_HEADER = struct.Struct("=I4xQ16xQ16x")
"""Of a program header (Elf64_Phdr): its type, where in the file it begins, and its size there."""
_LIBRARY = re.compile(rb"^\t(\S+) => (/\S+) \(0x", re.MULTILINE)
"""A line of the loader's list of libraries."""
_READ_BY_LOADER = ("/etc/ld.so.cache", "/etc/ld.so.preload")
"""Files besides the libraries that decide what is loaded (ld.so(8))."""
_LOADER_TIMEOUT_S = 10.0
"""How long the loader may take to list libraries. It takes milliseconds; the value is an estimate."""


class NoShellFilesError(Exception):
    """Shells cannot be forked on this host. The text says why."""


def make(folder: Path, library: Path = Path(spawn.PRELOADED)) -> str:
    """Make the files anew, in `files` below a folder; `empty` beside it is empty. Return a digest of them. 10 ms.

    Args:
        folder: It is made anew.
        library: What `preloaded.c` was compiled into.

    Raises:
        NoShellFilesError: They cannot be made here. The folder is then missing or of no use.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        files = folder / "files"
        for directory in (files, folder / "empty"):
            directory.mkdir(parents=True)
            # Whatever the umask is: the agent's processes may have any user.
            directory.chmod(0o755)
        if not library.exists():
            raise NoShellFilesError(f"{library} was not compiled")
        bash = Path(spawn.BASH).read_bytes()
        loader, program = with_loader(bash, f"{spawn.SHELL_FILES}/loader")
        libraries = _libraries(loader)
        contents = {"bash": program, "loader": Path(loader).read_bytes(), "preloaded.so": library.read_bytes()}
        contents |= {name: path.read_bytes() for name, path in libraries.items()}
        involved = [spawn.BASH, loader, *map(str, libraries.values()), *_READ_BY_LOADER]
        facts = shell_facts.facts_of([os.fsencode(path) for path in involved])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise NoShellFilesError(str(error)) from error
    if Path(_READ_BY_LOADER[1]).exists():
        raise NoShellFilesError(f"{_READ_BY_LOADER[1]} has libraries that bash would load too")
    digest = hashlib.blake2b(b"".join(contents[name] for name in sorted(contents)), digest_size=16)
    # The digest comes last: it says that the others are whole.
    contents |= {"facts": facts, "digest": digest.hexdigest().encode()}
    for name, content in contents.items():
        path = files / name
        path.write_bytes(content)
        path.chmod(0o755)
    return digest.hexdigest()


def with_loader(program: bytes, loader: str) -> tuple[str, bytes]:
    """Return the loader that a program names, and the program with another one, whose path may not be longer.

    Raises:
        NoShellFilesError: It is no 64-bit program that names a loader, or its loader's path is too short.
    """
    if not program.startswith(_DYNAMIC_64_LITTLE) or len(program) < _HEADER.size:
        raise NoShellFilesError("bash is no 64-bit program of this byte order")
    first, size, count = _HEADER.unpack_from(program)
    for index in range(count):
        at = first + index * size
        if at + _PROGRAM_HEADER.size > len(program):
            break
        kind, begin, length = _PROGRAM_HEADER.unpack_from(program, at)
        if kind != _INTERPRETER:
            continue
        named = program[begin : begin + length].rstrip(b"\0").decode(errors="surrogateescape")
        if len(loader) >= length:
            break
        return named, program[:begin] + loader.encode().ljust(length, b"\0") + program[begin + length :]
    raise NoShellFilesError("bash names no loader, or one whose path is too short")


def _libraries(loader: str) -> dict[str, Path]:
    """Return the libraries that bash needs, by the names that it needs them under."""
    listed = subprocess.run(  # noqa: S603 - the host's own loader and bash
        [loader, "--list", spawn.BASH],
        env={}, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_LOADER_TIMEOUT_S,
    ).stdout  # fmt: skip
    found = {name.decode(): Path(path.decode()) for name, path in _LIBRARY.findall(listed)}
    if not found or any("/" in name for name in found):
        raise NoShellFilesError(f"{loader} lists no libraries of {spawn.BASH}")
    return found
