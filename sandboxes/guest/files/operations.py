"""Operations on files inside the sandbox's root: put, get, delete, unpack, and the operations of other modules."""

# Theory of operation.
#
# Each operation runs in a child of the supervisor, which ends with the operation (`child`). Paths are the agent's. The
# child has none of the supervisor's descriptors, so no link of /proc leads out of the sandbox. It may block or run out
# of memory, and is then killed as a command would be.

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tarfile
from typing import Any, NoReturn

from sandboxes.guest.files import docker_archive, shared_sqlite, user_files
from sandboxes.ipc.codec import decode_bytes, encode
from sandboxes.ipc.messages import FileOutcome
from sandboxes.linux import oom_score
from sandboxes.linux.files import remove_path
from sandboxes.shell_text import AGENT_SCORE

FileAnswer = tuple[int, str, bytes]
"""HTTP status, media type and body of an answer."""
Result = tuple[FileOutcome, bytes]
"""An operation's outcome, and the body of its answer."""
_CHUNK = 1 << 20
"""How much is read or written at once, in bytes."""
_SOURCE_FD, _RESULT_FD = 3, 4
"""The only descriptors of a child, besides its standard streams: the archive to unpack, and the pipe for its result."""


class FileRequestError(Exception):
    """An operation cannot be carried out; with the status and the title of the problem details."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title = status, title


def perform(tool: str, fields: dict[str, Any], body: bytes) -> FileAnswer | Result:
    """Run an operation; return its answer: problem details on failure, an outcome for a database statement."""
    try:
        if isinstance(path := fields.get("path"), str):
            user_files.require_foreign(path)
        return _perform(tool, fields, body)
    except docker_archive.ArchiveError as refusal:
        return problem(refusal.status, "Archive operation failed", str(refusal))
    except FileRequestError as refusal:
        return problem(refusal.status, refusal.title, str(refusal))
    except (FileNotFoundError, NotADirectoryError) as error:
        return problem(404, "No such file", f"{fields.get('path')}: {error.strerror}")
    except OSError as error:
        # 507 tells the client that the sandbox is full (RFC 4918, 11.5): a retry without a deletion cannot help.
        full = error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
        status = 507 if full else 409
        return problem(status, "File operation failed", f"{fields.get('path')}: {error.strerror}")


def _perform(tool: str, fields: dict[str, Any], body: bytes) -> FileAnswer | Result:
    match tool:
        case "put":
            return _put(fields["path"], fields.get("mode"), body)
        case "get":
            return _get(fields["path"], fields["limit_bytes"])
        case "entries":
            return _entries(fields["paths"], fields["content_bytes"])
        case "delete":
            return _delete(fields["path"])
        case "unpack":
            return _unpack(fields["target"])
        case "sql":
            return _sql(fields)
        case _:
            return docker_archive.perform(tool, fields, body)


def _as_user(tool: str, fields: dict[str, Any], body: bytes) -> FileAnswer:
    def transfer(path: str) -> FileAnswer:
        try:
            return _get(path, fields["limit_bytes"]) if tool == "read" else _put(path, None, body, owns=True)
        except FileRequestError as refusal:
            status = refusal.status if refusal.status == 413 else 422
            raise user_files.UserFileError(status, "invalid", str(refusal)) from refusal

    return user_files.perform(tool, fields, transfer)


def problem(status: int, title: str, detail: str) -> FileAnswer:
    """Return an answer with problem details (RFC 9457)."""
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return status, "application/problem+json", json.dumps(body).encode()


def _open_regular(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a FIFO would wait for its other end. O_NOCTTY: a terminal must not become this process's.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    # The checks before were of the path. Here they are of the open file, which the agent cannot exchange any more.
    if not user_files.is_foreign(fd):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileRequestError(
            409, "Not a regular file", f"{path} is not a regular file: only regular files can be transferred"
        )
    return fd


def _check_regular(path: str) -> os.stat_result | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - pathlib is not loaded in pid 1
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise FileRequestError(
            409, "Not a regular file", f"{path} is a device, pipe or socket: only regular files can be transferred"
        )
    return status


def _put(path: str, mode: int | None, body: bytes, *, owns: bool = False) -> FileAnswer:
    # Checked before opening: opening a device may have effects.
    before = _check_regular(path)
    if before is not None and stat.S_ISDIR(before.st_mode):
        raise FileRequestError(409, "Is a directory", f"{path} is a directory: give the path of a file in it")
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)  # noqa: PTH103, PTH120
    fd = _open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(fd, "wb", buffering=0) as file:  # noqa: PTH123
        if owns and os.fstat(fd).st_uid == os.geteuid():
            # E2B's server does this too, and watches of the directory report it. The owner stays the same.
            os.fchown(fd, os.geteuid(), -1)
        # In pieces, because one write has a limit of 2 GB.
        view = memoryview(body)
        while view:
            # write(2) may take less than it was given, so the rest is written in the next round.
            view = view[file.write(view[:_CHUNK]) :]
        if mode is not None:
            os.fchmod(fd, mode & 0o7777)
    return (201 if before is None else 204), "application/octet-stream", b""


def _get(path: str, limit_bytes: int) -> FileAnswer:
    status = _check_regular(path)
    if status is None:
        return problem(404, "No such file", f"{path} does not exist in the sandbox")
    if stat.S_ISDIR(status.st_mode):
        return 200, "application/json", json.dumps({"entries": _listing(path)}).encode()
    fd = _open_regular(path, os.O_RDONLY)
    with open(fd, "rb") as file:  # noqa: PTH123
        # In pieces, because a read of the whole limit would reserve that much memory.
        content = bytearray()
        # One byte more than the limit is read: a file may grow meanwhile, so its size at the start proves nothing.
        while len(content) <= limit_bytes and (piece := file.read(min(_CHUNK, limit_bytes + 1 - len(content)))):
            content += piece
    if len(content) > limit_bytes:
        raise FileRequestError(
            413, "File too large", f"{path} has more than {limit_bytes} bytes: read it in parts with exec"
        )
    return 200, "application/octet-stream", bytes(content)


def _listing(path: str) -> list[dict[str, Any]]:
    entries = []
    with os.scandir(path) as listing:
        for entry in listing:
            status = entry.stat(follow_symlinks=False)
            # JSON holds Unicode only, and a file's name may be any bytes.
            name = os.fsencode(entry.name).decode(errors="replace")
            entries.append({"name": name, "type": user_files.type_of(status), "size": status.st_size})
    return sorted(entries, key=lambda entry: str(entry["name"]))


def _entries(paths: list[str], content_bytes: int) -> FileAnswer:
    """Return the entry at each path, links not followed; only the driver uses this operation, no agent can."""
    entries = {}
    for path in paths:
        with contextlib.suppress(OSError):
            entries[path] = _entry(path, content_bytes)
    return 200, "application/json", json.dumps(entries).encode()


def _entry(path: str, content_bytes: int) -> dict[str, Any]:
    status = os.lstat(path)
    facts = {
        "kind": user_files.type_of(status), "mode": stat.S_IMODE(status.st_mode), "uid": status.st_uid,
        "gid": status.st_gid, "size_bytes": status.st_size,
    }  # fmt: skip
    if stat.S_ISLNK(status.st_mode):
        return {**facts, "target": os.readlink(path)}  # noqa: PTH115
    if stat.S_ISREG(status.st_mode) and status.st_size <= content_bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123
            return {**facts, "content": file.read(content_bytes).decode("latin-1")}
    return facts


def _delete(path: str) -> FileAnswer:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return problem(404, "No such file", f"{path} does not exist in the sandbox")
    if stat.S_ISDIR(status.st_mode):
        remove_path(path)
    else:
        os.unlink(path)  # noqa: PTH108
    return 204, "application/octet-stream", b""


def _unpack(target: str) -> FileAnswer:
    os.makedirs(target, exist_ok=True)  # noqa: PTH103
    try:
        # `r|*` reads the archive as a stream, without seeking, because descriptor 3 may be a pipe.
        with os.fdopen(3, "rb") as source, tarfile.open(fileobj=source, mode="r|*") as archive:
            # This process is inside the sandbox's root, so no path in the archive can lead out of it. Debian 12's
            # Python has no filters yet and trusts archives fully.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(target, numeric_owner=True)  # noqa: S202
    except (tarfile.TarError, EOFError) as error:
        return problem(422, "Not an archive", str(error))
    return 204, "application/octet-stream", b""


def checksum_differs(sha256: object, body: bytes) -> bool:
    """Return whether a checksum was announced that differs from the checksum of the body."""
    return isinstance(sha256, str) and hashlib.sha256(body).hexdigest() != sha256.lower()


def _sql(fields: dict[str, Any]) -> Result:
    facts, answer = shared_sqlite.perform(fields)
    return FileOutcome(200, "application/json", facts), answer


def outcome_of(result: Result | FileAnswer) -> Result:
    """Return an operation's answer as an outcome and a body."""
    if len(result) == 2:
        return result
    status, media_type, body = result
    return FileOutcome(status, media_type), body


def run_apart(tool: str, fields: dict[str, Any], body: bytes, result: int, source: int | None) -> NoReturn:
    """In the child: run an operation, write its outcome and answer to the result pipe, and end."""
    code = 1
    with contextlib.suppress(BaseException):
        # Nothing of the supervisor's stays open, so no path through /proc/self/fd leads to it. The archive is
        # duplicated first, because its number may be that of the result.
        archive = None if source is None else fcntl.fcntl(source, fcntl.F_DUPFD, _RESULT_FD + 1)
        os.dup2(result, _RESULT_FD)
        os.closerange(_SOURCE_FD, _RESULT_FD)
        if archive is not None:
            os.dup2(archive, _SOURCE_FD)
        # `confine` limits descriptors to 65,536, so none is above this range.
        os.closerange(_RESULT_FD + 1, 1 << 16)
        # Without root this file cannot be written, and the child has the score of pid 1.
        oom_score.write(AGENT_SCORE)
        done = _as_user if tool in user_files.TOOLS else perform
        try:
            outcome, answer = outcome_of(done(tool, fields, body))
        # `tarfile` and `os.makedirs` call themselves once for each level of directories.
        except RecursionError:
            outcome, answer = outcome_of(problem(409, "File operation failed", "directories are nested too deeply"))
        with os.fdopen(_RESULT_FD, "wb") as pipe:
            packed = encode(outcome)
            pipe.write(b"%d %d\n" % (len(packed), len(answer)) + packed + answer)
        code = 0
    os._exit(code)


def parse_result(data: bytes, *, whole: bool) -> Result:
    """Return what a child wrote to its result pipe. The agent's processes may have interfered with it."""
    # Two lengths in a line, the outcome, then the answer as it is: a frame would need another copy of what may be half
    # a gigabyte. A child that is killed while it writes, for its memory or by the agent, leaves a shorter one.
    head, _, rest = data.partition(b"\n")
    # Decoded like any message from outside; whatever does not have the exact form becomes the error below.
    with contextlib.suppress(ValueError):
        packed_bytes, answer_bytes = map(int, head.split())
        if whole and packed_bytes >= 0 and packed_bytes + answer_bytes == len(rest):
            return decode_bytes(rest[:packed_bytes], FileOutcome), rest[packed_bytes:]
    return outcome_of(problem(507, "File operation failed", "it ran out of time, memory or disk"))
