"""Users as the files of a sandbox name them: what `USER` of an image, or of a call, stands for.

The files are the agent's, so they are read with a limit, and not by libc, which would load modules for other databases
from the sandbox. Each byte of a name is a character here (Latin-1), because nothing says what encoding it has.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened

_MAX_BYTES = 1 << 20
"""What is read of /etc/passwd and /etc/group. Those of large organisations have some hundred kilobytes."""
_MAX_GROUPS = 1024
"""The most groups of a user that are used (half of what the kernel takes, NGROUPS_MAX of old kernels is 32)."""
_LAST_ID = (1 << 32) - 2
"""The highest user or group; the next number stands for "no change" (setresuid(2))."""


class UnknownUserError(Exception):
    """The sandbox has no such user or group. The text is that of container runtimes."""


@dataclass(frozen=True)
class User:
    """A user with its groups. The name is empty for a number that no line has."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    name: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that name it."""
        return {"HOME": self.home, "USER": self.name or str(self.uid)}

    @property
    def is_root(self) -> bool:
        """Whether it is root as each sandbox starts it."""
        return self.uid == 0 and self.gid == 0 and self.groups == (0,)


ROOT = User(0, 0, (0,), "/root", "root")


def has_several() -> bool:
    """Return whether there are more users than one: an ordinary user's sandbox has one (user_namespaces(7))."""
    with open("/proc/self/uid_map", "rb") as file:  # noqa: PTH123 - pathlib is not loaded in pid 1
        return int(file.readline().split()[2]) > 1


def read(user: str, root: str = "/") -> User:
    """Return a user of a directory that is a root, and no link; see `resolve`."""
    with _opened(root) as top:
        return resolve(user, _lines(top, b"etc/passwd"), _lines(top, b"etc/group"))


def name_of(file: bytes, number: int, root: str = "/") -> str | None:
    """Return the name of a user (`etc/passwd`) or of a group (`etc/group`); None without one."""
    with _opened(root) as top:
        return next((entry[0] for entry in _entries(_lines(top, file)) if _number(entry[2]) == number), None)


def resolve(user: str, passwd: Sequence[str], group: Sequence[str]) -> User:
    """Return what a user is, by the rules of container runtimes and the lines of both files (pure)."""
    # It is given as `user`, `uid`, `user:group` and so on; empty for root.
    wanted, _, wanted_group = user.partition(":")
    # What is a number is never a name.
    uid, gid, home, name = _number(wanted or "0"), 0, "/", ""
    for entry in _entries(passwd):
        if entry[0] == wanted if uid is None else _number(entry[2]) == uid:
            uid, gid, home, name = _number(entry[2]), _number(entry[3]) or 0, entry[5] or "/", entry[0]
            break
    if uid is None:
        raise UnknownUserError(f"unable to find user {wanted}: no matching entries in passwd file")
    if not wanted_group:
        more = [_number(entry[2]) for entry in _entries(group) if name and name in entry[3].split(",")]
        groups = tuple(dict.fromkeys([gid, *(number for number in more if number is not None)]))
        return User(uid, gid, groups[:_MAX_GROUPS], home, name)
    given = _number(wanted_group)
    if given is None:
        given = next((_number(entry[2]) for entry in _entries(group) if entry[0] == wanted_group), None)
    if given is None:
        raise UnknownUserError(f"unable to find group {wanted_group}: no matching entries in group file")
    return User(uid, given, (given,), home, name)


def _entries(lines: Sequence[str]) -> Iterator[list[str]]:
    for line in lines:
        parts = f"{line}:::::".split(":")
        if _number(parts[2]) is not None:
            yield parts


def _number(text: str) -> int | None:
    # Digits of ASCII only: Python takes others for numbers too.
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_LAST_ID)) else None
    return number if number is not None and number <= _LAST_ID else None


def _opened(root: str) -> Opened:
    return Opened(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def _lines(root: int, path: bytes) -> list[str]:
    # A FIFO would let this process wait without an end. A link to another file system leads out of the layers:
    # /proc has files of this process.
    how = kernel.open_how(os.O_RDONLY | os.O_NONBLOCK, kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_XDEV)
    try:
        fd = kernel.openat2(root, path, how)
    except OSError:
        return []
    with Opened(fd):
        return lines_in(fd)


def lines_in(file: int) -> list[str]:
    """Return the lines of an open file, up to 1 MiB; none if it is no file."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return []
    # Latin-1 has a character for each byte. Not `splitlines`, which ends lines at more characters than one.
    lines = os.pread(file, _MAX_BYTES, 0).decode("latin-1").split("\n")
    # A line that was cut would have another number.
    return lines if status.st_size < _MAX_BYTES else lines[:-1]
