"""put, get, delete, unpack and what `archives` has: operations inside the sandbox's root, each in a child of pid 1 that
lives as long as it takes.

A child, because paths are the agent's: it holds none of pid 1's descriptors, so no link of /proc leads out; it may
block or run out of memory, and is then killed like any command.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tarfile
from typing import Any

from sandboxes.guest import docker_archive as archives
from sandboxes.guest import shared_sqlite as inside
from sandboxes.guest import user_files as entries

_CHUNK = 1 << 20


class FileRequestError(Exception):
    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title = status, title


def perform(tool: str, fields: dict[str, Any], body: bytes) -> tuple[int, str, bytes] | tuple[dict[str, Any], bytes]:
    """Return an HTTP status, a media type and a body; failures of the operation are problem details (RFC 9457).

    What is more to be told of an operation comes as a dictionary, with `status` and `media_type`, and the body.
    """
    try:
        match tool:
            case "put":
                return _put(fields["path"], fields.get("mode"), body)
            case "get" | "entries":
                return _look(tool, fields)
            case "delete":
                return _delete(fields["path"])
            case "unpack":
                return _unpack(fields["target"])
            case "sql":
                return _sql(fields)
            case _:
                return archives.perform(tool, fields, body)
    except archives.ArchiveError as refusal:
        return problem(refusal.status, "Archive operation failed", str(refusal))
    except FileRequestError as refusal:
        return problem(refusal.status, refusal.title, str(refusal))
    except (FileNotFoundError, NotADirectoryError) as error:
        return problem(404, "No such file", f"{fields.get('path')}: {error.strerror}")
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
        status = 507 if full else 409
        return problem(status, "File operation failed", f"{fields.get('path')}: {error.strerror}")


def _as_user(tool: str, fields: dict[str, Any], body: bytes) -> tuple[int, str, bytes]:
    def transfer(path: str) -> tuple[int, str, bytes]:
        return _get(path, fields["limit_bytes"]) if tool == "read" else _put(path, None, body, owns=True)

    return entries.perform(tool, fields, transfer)


def problem(status: int, title: str, detail: str) -> tuple[int, str, bytes]:
    """Return problem details as an answer."""
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return status, "application/problem+json", json.dumps(body).encode()


def _open_regular(path: str, flags: int, mode: int = 0o644) -> int:
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
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


def _put(path: str, mode: int | None, body: bytes, *, owns: bool = False) -> tuple[int, str, bytes]:
    before = _check_regular(path)
    if before is not None and stat.S_ISDIR(before.st_mode):
        raise FileRequestError(409, "Is a directory", f"{path} is a directory: give the path of a file in it")
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)  # noqa: PTH103, PTH120
    fd = _open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(fd, "wb", buffering=0) as file:  # noqa: PTH123
        if owns and os.fstat(fd).st_uid == os.geteuid():
            # As E2B's server does, which who watches is told of; nothing becomes another's.
            os.fchown(fd, os.geteuid(), -1)
        view = memoryview(body)
        while view:
            view = view[file.write(view[:_CHUNK]) :]
        if mode is not None:
            os.fchmod(fd, mode & 0o7777)
    return (201 if before is None else 204), "application/octet-stream", b""


def _get(path: str, limit_bytes: int) -> tuple[int, str, bytes]:
    status = _check_regular(path)
    if status is None:
        return problem(404, "No such file", f"{path} does not exist in the sandbox")
    if stat.S_ISDIR(status.st_mode):
        return 200, "application/json", json.dumps({"entries": _listing(path)}).encode()
    fd = _open_regular(path, os.O_RDONLY)
    with open(fd, "rb") as file:  # noqa: PTH123
        # In pieces: asking for the whole limit at once would reserve that much memory.
        content = bytearray()
        while len(content) <= limit_bytes and (piece := file.read(min(_CHUNK, limit_bytes + 1 - len(content)))):
            content += piece
    if len(content) > limit_bytes:
        raise FileRequestError(
            413, "File too large", f"{path} has more than {limit_bytes} bytes: read it in parts with exec"
        )
    return 200, "application/octet-stream", bytes(content)


def _listing(path: str) -> list[dict[str, Any]]:
    entries = []
    with os.scandir(path) as found:
        for entry in found:
            status = entry.stat(follow_symlinks=False)
            name = os.fsencode(entry.name).decode(errors="replace")
            entries.append({"name": name, "type": _type(status.st_mode), "size": status.st_size})
    return sorted(entries, key=lambda entry: str(entry["name"]))


def _type(mode: int) -> str:
    for is_type, name in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink")):
        if is_type(mode):
            return name
    return "other"


def _look(tool: str, fields: dict[str, Any]) -> tuple[int, str, bytes]:
    if tool == "get":
        return _get(fields["path"], fields["limit_bytes"])
    return _entries(fields["paths"], fields["content_bytes"])


def _entries(paths: list[str], content_bytes: int) -> tuple[int, str, bytes]:
    """Answer with what is at each path, links not followed; for the driver, no agent can ask for it."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = _entry(path, content_bytes)
    return 200, "application/json", json.dumps(found).encode()


def _entry(path: str, content_bytes: int) -> dict[str, Any]:
    status = os.lstat(path)
    told = {
        "kind": _type(status.st_mode), "mode": stat.S_IMODE(status.st_mode), "uid": status.st_uid,
        "gid": status.st_gid, "size_bytes": status.st_size,
    }  # fmt: skip
    if stat.S_ISLNK(status.st_mode):
        return {**told, "target": os.readlink(path)}  # noqa: PTH115
    if stat.S_ISREG(status.st_mode) and status.st_size <= content_bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:  # noqa: PTH123
            return {**told, "content": file.read(content_bytes).decode("latin-1")}
    return told


def _delete(path: str) -> tuple[int, str, bytes]:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return problem(404, "No such file", f"{path} does not exist in the sandbox")
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)  # noqa: PTH108
    return 204, "application/octet-stream", b""


def _unpack(target: str) -> tuple[int, str, bytes]:
    """Unpack the tar stream on descriptor 3 below target, as tar would inside the sandbox."""
    os.makedirs(target, exist_ok=True)  # noqa: PTH103
    try:
        with os.fdopen(3, "rb") as source, tarfile.open(fileobj=source, mode="r|*") as archive:
            # Inside the sandbox's own root: whatever path the archive names stays in it. Debian 12's Python knows no
            # filters yet, and trusts fully.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(target, numeric_owner=True)  # noqa: S202
    except (tarfile.TarError, EOFError) as error:
        return problem(422, "Not an archive", str(error))
    return 204, "application/octet-stream", b""


def checksum_differs(sha256: object, body: bytes) -> bool:
    """Whether the announced checksum, if any, is not that of body."""
    return isinstance(sha256, str) and hashlib.sha256(body).hexdigest() != sha256.lower()


def _sql(fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    told, answer = inside.perform(fields)
    return {"status": 200, "media_type": "application/json", **told}, answer


def _headed(answer: tuple[int, str, bytes] | tuple[dict[str, Any], bytes]) -> tuple[dict[str, Any], bytes]:
    if len(answer) == 2:
        return answer
    status, media_type, body = answer
    return {"status": status, "media_type": media_type}, body


def run_apart(tool: str, fields: dict[str, Any], body: bytes, result: int, source: int | None) -> None:
    """In the child: keep result (and source as 3), close all else, perform, answer, end. Never returns."""
    code = 1
    with contextlib.suppress(BaseException):
        os.dup2(result, 4)
        if source is not None:
            os.dup2(source, 3)
        os.closerange(5, 1 << 16)
        # Without root there was no shelter to give up, nor the right to write this.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("0")
        done = _as_user if tool in entries.TOOLS else perform
        told, answer = _headed(done(tool, fields, body))
        head = json.dumps(told).encode() + b"\n"
        with os.fdopen(4, "wb") as pipe:
            pipe.write(head + answer)
        code = 0
    os._exit(code)


def heard(data: bytes, *, whole: bool) -> tuple[dict[str, Any], bytes]:
    """Return what a child that ran apart told of its operation, and its answer; whole: whether it came to its end."""
    head, _, body = data.partition(b"\n")
    if whole and head:
        told: dict[str, Any] = json.loads(head)
        return told, body
    return _headed(problem(507, "File operation failed", "it ran out of time, memory or disk"))
