"""Canonical forms of request bodies and queries, for call keys: equal contents have equal forms (pure).

A form leaves out spelling: the order of JSON members, a multipart boundary, the times inside an archive. A malformed
body is identified by the digest of its bytes, so that a mistake here costs a miss and never a wrong hit.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import posixpath
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from operator import itemgetter
from typing import IO, Any, cast

import orjson

from proxy.dialects import multipart
from proxy.dialects.multipart import FormPart, MalformedFormError
from sandboxes.tool_clients.json_text import parse_json

MAX_UNPACKED_BYTES = 256 << 20
"""Limits the unpacked size of an archive. A larger archive is identified by the digest of its own bytes."""
_LONG_NUMBER = re.compile(rb"[0-9](?:[0-9.]{15}|[eE]-?[0-9]{3})|-0(?![0-9.eE])")
"""Matches numbers that a value may not hold: a double has 15 to 17 decimal digits and none below 1e-324, and an integer
has no minus zero."""
_EXACT_DIGITS = 18
"""Longest text of an integer that surely has 64 bits."""
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_NAME = re.compile(rb'"[ \t\r\n]*:')
"""Matches the end of a member's name in a JSON text, and sometimes a part of a string."""


def media_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def query_form(query: str) -> list[str]:
    """Return a query's members sorted by name. The order of equal names counts.

    Only escapes of letters, digits and `-._~` are spelling (RFC 3986, 6.2.2.2). Servers see that `a` is not `a=`, and
    some see that `+` is not `%20`.
    """
    members = _ESCAPE.sub(_unescaped, query).split("&")
    return sorted(members, key=lambda member: member.partition("=")[0])


def _unescaped(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if character.isascii() and (character.isalnum() or character in "-._~") else escape[0].upper()


def body_form(body: bytes, content_type: str, *, archives: bool = False) -> Any:
    """Return a body's form as a JSON value; None for an empty body.

    JSON, URL-encoded and multipart forms, and `archives`, have forms of their contents; other types their digest.
    """
    if not body:
        return None
    kind = media_type(content_type)
    if kind == "application/json" or kind.endswith("+json"):
        value = json_value(body)
        if value is not None:
            # Servers disagree on which of two members with one name counts, and some refuse both.
            return {"json": value[0]} | (_raw(body) if _has_twins(body, value[0]) else {})
    if kind == "application/x-www-form-urlencoded":
        try:
            return {"form": query_form(body.decode())}
        except ValueError:
            return _raw(body)
    if kind == "multipart/form-data":
        with suppress(MalformedFormError):
            form = file_form if archives else _raw
            return {"parts": [_part(part, form) for part in multipart.parts(body, content_type)]}
        # A tool server may be able to read it, and then the boundary decides what the parts are.
        return {**_raw(body), "boundary": content_type}
    return file_form(body) if archives else _raw(body)


def json_value(body: bytes) -> tuple[Any] | None:
    """Return the value of a JSON text in a 1-tuple; None if malformed. Numbers that would lose digits keep theirs."""
    try:
        return (parse_json(body) if _LONG_NUMBER.search(body) is None else _with_digits(body),)
    except (ValueError, TypeError, RecursionError):
        return None


def _with_digits(body: bytes) -> Any:
    value = json.loads(body, parse_float=_exact_float, parse_int=_exact_int, parse_constant=_refused)
    # It reads half of a surrogate pair, too, and deeper than can be written.
    orjson.dumps(value)
    return value


# Other numbers stay numbers: rules compare them, and rollouts are named by them.
def _exact_int(text: str) -> int | orjson.Fragment:
    return orjson.Fragment(text) if len(text) > _EXACT_DIGITS or text == "-0" else int(text)


def _exact_float(text: str) -> float | orjson.Fragment:
    value = float(text)
    try:
        # Of all numbers that become one float, only one is its shortest text; equal numbers differ in spelling alone.
        return value if Decimal(text) == Decimal(repr(value)) else orjson.Fragment(text)
    except InvalidOperation:
        return orjson.Fragment(text)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _has_twins(body: bytes, value: Any) -> bool:
    """Return whether an object in a JSON text may have two members of one name; `value` is the text's value."""
    members, left = 0, [value]
    while left:
        inner = left.pop()
        if isinstance(inner, dict):
            members += len(inner)
            left.extend(inner.values())
        elif isinstance(inner, list):
            left.extend(inner)
    if len(_NAME.findall(body)) == members:
        return False
    found = False

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len(pairs) != len(dict(pairs))
        return dict(pairs)

    json.loads(body, object_pairs_hook=look)
    return found


def _part(part: FormPart, form: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return a part's form. Its own headers count: the same bytes as text/plain and as text/csv are two uploads."""
    text = None if part.filename is not None else _text(part.data)
    content = {"text": text} if text is not None else {"file": form(part.data)}
    return {"name": part.name, "headers": sorted(map(list, part.headers), key=itemgetter(0))} | content


def _text(data: bytes) -> str | None:
    try:
        return data.decode() if len(data) <= 1 << 16 else None
    except UnicodeDecodeError:
        return None


def file_form(data: bytes) -> Any:
    """Return a file's form: an archive's members by name, mode and digest (see `in_any_order`); else its digest."""
    try:
        if data.startswith(b"PK\x03\x04"):
            return {"archive": _zip_members(data)}
        if data.startswith(b"\x1f\x8b") or data[257:262] == b"ustar":
            return {"archive": _tar_members(data)}
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, ValueError, RuntimeError, NotImplementedError):
        pass
    return _raw(data)


def _zip_members(data: bytes) -> list[list[Any]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        _require_small(member.file_size for member in members)
        rows = [[m.filename, m.external_attr >> 16, sha256(archive.read(m)).hexdigest()] for m in members]
    return in_any_order(rows, [(m.filename, m.is_dir()) for m in members])


def _tar_members(data: bytes) -> list[list[Any]]:
    rows, members = list[list[Any]](), list[tuple[str, bool]]()
    size = 0
    with open_tar(data) as archive:
        for member in archive:
            size += member.size
            _require_small([size])
            file = archive.extractfile(member) if member.isreg() else None
            digest = sha256(file.read()).hexdigest() if file is not None else ""
            kind = member.type.decode("latin-1")
            rows.append([member.name, member.mode, kind, member.linkname, member.uname, digest])
            members.append((UNORDERED if member.islnk() else member.name, member.isdir()))
    return in_any_order(rows, members)


UNORDERED = ".."
"""Stands for the path of a member that needs those before it: a hard link."""


def in_any_order(rows: list[list[Any]], members: list[tuple[str, bool]]) -> list[list[Any]]:
    """Return the rows of an archive's members sorted by name, but as they are if their order decides what is unpacked.

    `members` are the path of each member and whether it is a directory. The order decides if two members have one path,
    or if a path leads through another member that is no directory.
    """
    kinds = {posixpath.normpath(f"/{path.lstrip('/')}"): is_directory for path, is_directory in members}
    is_ordered = len(kinds) < len(members) or any(".." in path.split("/") for path, _ in members)
    if is_ordered or not all(kinds.get(parent, True) for path in kinds for parent in _parents(path)):
        return rows
    return sorted(rows, key=lambda row: str(row[0]))


def _parents(path: str) -> Iterator[str]:
    while (path := posixpath.dirname(path)) != "/":
        yield path


@contextmanager
def open_tar(data: bytes) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, compressed or not, from which at most `MAX_UNPACKED_BYTES` are read.

    A header claims any size, and a small compressed body unpacks to any. Raises tarfile.TarError if it is no archive.
    Reading raises ValueError too if it is larger, and OSError or EOFError if its compression is damaged.
    """
    with _decompressed(data) as stream, tarfile.open(fileobj=cast("Any", _FormReader(stream)), mode="r:") as archive:
        try:
            yield archive
        # A header that describes the next header makes tarfile call itself, as often as the archive likes.
        except RecursionError as error:
            raise ValueError("the archive has too many headers for one member") from error


def _decompressed(data: bytes) -> IO[bytes]:
    source = io.BytesIO(data)
    if data.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=source))
    if data.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(source))
    if data.startswith(b"\xfd7zXZ\0"):
        return cast("IO[bytes]", lzma.LZMAFile(source))
    return source


class _FormReader:
    """A file of which nothing beyond `MAX_UNPACKED_BYTES` is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.tell = file, file.tell

    def read(self, size: int = -1) -> bytes:
        _require_small([self.tell() + (MAX_UNPACKED_BYTES + 1 if size < 0 else size)])
        try:
            return self._file.read(size)
        except (zlib.error, lzma.LZMAError) as error:
            raise OSError(str(error)) from error

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position; in a compressed file all before it is unpacked."""
        _require_small([position])
        return self._file.seek(position, whence)


def _require_small(sizes: Iterable[int]) -> None:
    if sum(sizes) > MAX_UNPACKED_BYTES:
        raise ValueError("the archive unpacks to more than MAX_UNPACKED_BYTES")


def _raw(data: bytes) -> dict[str, str]:
    return {"sha256": sha256(data).hexdigest()}
