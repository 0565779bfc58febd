"""Files as one of the sandbox's users: read, write, info, list, mkdir, move and remove, in a child.

The child becomes the user. Paths may be relative to that user's home. The texts of errors equal E2B's servers.
"""

import errno
import json
import os
import stat
import time
from collections.abc import Callable
from typing import Any

from sandboxes.guest import users
from sandboxes.guest.users import UnknownUserError
from sandboxes.linux.confine import become_user
from sandboxes.linux.files import remove_path

TOOLS = frozenset({"read", "write", "info", "list", "mkdir", "move", "remove"})
_MOST_PARTS = 10_000
"""The most names on the way to a file, with those of links, that are looked at; the kernel follows 40 links."""
MAX_ENTRIES = 100_000
"""The most entries of one listing: some 30 MB of JSON."""
_TYPES = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink"))


class UserFileError(Exception):
    """An operation cannot be carried out. The kind is `not_found`, `exists`, `invalid`, `denied` or `user`."""

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.kind = status, kind


def perform(
    tool: str, fields: dict[str, Any], transfer: Callable[[str], tuple[int, str, bytes]]
) -> tuple[int, str, bytes]:
    """Return an operation's answer: JSON, or the bytes of a file; JSON with `kind` and `detail` for a failure."""
    try:
        # Before the path is resolved: `~` is that user's, and each look-up below happens with that user's rights.
        _become(fields["user"])
        path = resolved(fields["path"], home())
        require_foreign(path)
        if tool == "read" and stat.S_ISDIR(os.stat(path).st_mode):  # noqa: PTH116
            raise UserFileError(422, "invalid", f"path '{path}' is a directory")  # noqa: TRY301
        if tool in {"read", "write"}:
            answer = transfer(path)
            if tool == "read" or answer[0] >= 300:
                return answer
        result = _entry(path) if tool == "write" else _run(tool, fields, path)
    except UserFileError as failure:
        return _problem(failure.status, failure.kind, str(failure))
    except FileNotFoundError as error:
        return _problem(404, "not_found", f"path '{error.filename}' does not exist")
    except NotADirectoryError as error:
        return _problem(422, "invalid", f"path '{error.filename}' is below something that is not a directory")
    except PermissionError as error:
        return _problem(403, "denied", f"path '{error.filename}': {error.strerror}")
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
        return _problem(507 if full else 409, "invalid", f"path '{error.filename}': {error.strerror}")
    # A path with a NUL byte.
    except ValueError as error:
        return _problem(422, "invalid", f"path {fields['path']!r}: {error}")
    return 200, "application/json", json.dumps(result).encode()


def open_folder(path: str, user: str) -> int:
    """Open a directory as a user; this process is that user from then on."""
    try:
        _become(user)
        path = resolved(path, home())
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise UserFileError(404, "not_found", f"path {path} not found: {error.strerror}") from error
    except NotADirectoryError as error:
        raise UserFileError(422, "invalid", f"path {path} not a directory") from error
    except PermissionError as error:
        raise UserFileError(403, "denied", f"path '{path}': {error.strerror}") from error
    except OSError as error:
        raise UserFileError(409, "invalid", f"path '{path}': {error.strerror}") from error


def home() -> str:
    """Return this process's home directory; / if the sandbox has no entry for its user."""
    return os.fsdecode(users.read(str(os.geteuid())).home.encode("latin-1"))


def resolved(path: str, start: str) -> str:
    """Return a path as an absolute one; start is the directory of relative paths."""
    if path == "~" or path.startswith("~/"):
        # Only `~` itself: a name such as `~other` is an ordinary file name here.
        path = start + path[1:]
    return os.path.normpath(os.path.join(start, path))  # noqa: PTH118 - pathlib is not loaded in pid 1


def require_foreign(path: str) -> None:
    """Raise `FileNotFoundError` for a path through /proc of this very process."""
    # It is a fork of pid 1: its addresses and its program are the host's, and no program of the sandbox can see them.
    own, folder, rest = f"/proc/{os.getpid()}", "/", path.split("/")[::-1]
    for _ in range(_MOST_PARTS):
        if folder == own:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not rest:
            return
        # Links are followed one by one, because those of /proc lead to files that have no path here.
        name = os.path.normpath(os.path.join(folder, rest.pop()))  # noqa: PTH118
        try:
            target = os.readlink(name)  # noqa: PTH115
        except OSError:
            folder = name
        else:
            rest += target.split("/")[::-1]
            folder = "/" if target.startswith("/") else folder
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def is_foreign(fd: int) -> bool:
    """Return whether an open file is no file of this process in /proc, and not its program."""
    # The agent may have exchanged a link since the path was looked at.
    if f"{os.readlink(f'/proc/self/fd/{fd}')}/".startswith(f"/proc/{os.getpid()}/"):  # noqa: PTH115
        return False
    if not os.path.samestat(os.fstat(fd), os.stat("/proc/self/exe")):  # noqa: PTH116
        return True
    # The base may have the same file. Then it is on a mount that the sandbox has.
    with open(f"/proc/self/fdinfo/{fd}") as facts, open("/proc/self/mountinfo") as mounts:  # noqa: PTH123
        mount = next(line.split()[1] for line in facts if line.startswith("mnt_id:"))
        return any(line.split()[0] == mount for line in mounts)


def _become(user: str) -> None:
    """Become a user of the sandbox; nothing happens for an empty name."""
    if not user:
        return
    try:
        found = users.read(user.encode(errors="surrogatepass").decode("latin-1"))
    except UnknownUserError:
        found = None
    # Container runtimes take any number, and a group after a colon. E2B's servers take what has a line.
    if found is None or not found.name or ":" in user:
        raise UserFileError(401, "user", f"error looking up user '{user}': user: unknown user {user}")
    # Without root the sandbox has one user only, which needs no change.
    if found.uid == os.geteuid():
        return
    try:
        become_user(found.uid, found.gid, found.groups)
    except OSError as error:
        raise UserFileError(403, "denied", f"this sandbox cannot become user '{user}': {error.strerror}") from error


def _run(tool: str, fields: dict[str, Any], path: str) -> Any:
    match tool:
        case "info":
            return _entry(path)
        case "list":
            return _listing(path, fields["depth"])
        case "mkdir":
            return _mkdir(path)
        case "move":
            return _move(path, resolved(fields["target"], home()))
    _remove(path)
    return {}


def type_of(status: os.stat_result) -> str:
    """Return what kind of entry this is, as answers name it."""
    return next((name for is_type, name in _TYPES if is_type(status.st_mode)), "other")


def _entry(path: str) -> dict[str, Any]:
    link = status = os.lstat(path)
    target = None
    if stat.S_ISLNK(link.st_mode):
        # Resolved inside the sandbox's root, so the target cannot be a file of the host.
        target = os.path.realpath(path)
        status = os.stat(path) if os.path.exists(path) else link  # noqa: PTH110, PTH116
    # Integers all the way: a float holds times of this century to some hundred nanoseconds only.
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return {
        "name": _text(os.path.basename(path) or "/"), "path": _text(path),  # noqa: PTH119
        "type": type_of(status),
        "size": status.st_size, "mode": stat.S_IMODE(status.st_mode), "permissions": stat.filemode(status.st_mode),
        "owner": _name(b"etc/passwd", status.st_uid), "group": _name(b"etc/group", status.st_gid),
        "modified": f"{when}.{nanoseconds:09d}Z", "link": None if target is None else _text(target),
    }  # fmt: skip


def _listing(path: str, depth: int) -> list[dict[str, Any]]:
    if not os.path.isdir(path):  # noqa: PTH112
        if not os.path.lexists(path):
            raise UserFileError(404, "not_found", f"path '{path}' does not exist")
        raise UserFileError(422, "invalid", f"path '{path}' is not a directory")
    entries: list[dict[str, Any]] = []
    # A list and not recursion: directories may be nested more deeply than Python recurses.
    folders = [(path, 1)]
    while folders:
        folder, level = folders.pop(0)
        for name in sorted(os.listdir(folder)):  # noqa: PTH208
            below = os.path.join(folder, name)  # noqa: PTH118
            if below == f"/proc/{os.getpid()}":
                continue
            if len(entries) == MAX_ENTRIES:
                raise UserFileError(413, "invalid", f"path '{path}' has more than {MAX_ENTRIES} entries")
            entries.append(_entry(below))
            # lstat and not stat: a link to a directory is listed but not entered, so there are no cycles.
            if level < depth and stat.S_ISDIR(os.lstat(below).st_mode):
                folders.append((below, level + 1))
    return sorted(entries, key=lambda entry: str(entry["path"]))


def _mkdir(path: str) -> dict[str, Any]:
    if os.path.isdir(path):  # noqa: PTH112
        raise UserFileError(409, "exists", f"directory already exists: {path}")
    if os.path.lexists(path):
        raise UserFileError(422, "invalid", f"path already exists but it is not a directory: {path}")
    os.makedirs(path)  # noqa: PTH103
    return _entry(path)


def _move(path: str, target: str) -> dict[str, Any]:
    # A missing source fails here, before any parent directory of the target is made.
    os.lstat(path)
    # E2B's server makes missing parents as well.
    os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
    try:
        # rename(2) is atomic. To another file system, such as /proc, it fails and changes nothing.
        os.rename(path, target)  # noqa: PTH104
    except OSError as error:
        raise UserFileError(422, "invalid", f"'{path}' cannot become '{target}': {error.strerror}") from error
    return _entry(target)


def _remove(path: str) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        remove_path(path)
    else:
        os.unlink(path)  # noqa: PTH108


def _name(file: bytes, number: int) -> str:
    name = users.name_of(file, number)
    # Names are UTF-8 here. Bytes that are none must not fail a listing.
    return str(number) if name is None else name.encode("latin-1").decode(errors="replace")


def _text(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")


def _problem(status: int, kind: str, detail: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"kind": kind, "detail": detail}).encode()
