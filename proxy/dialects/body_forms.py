"""Canonical forms of what a request carries: what differs only in its spelling has one form (pure)."""

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl

import orjson

MAX_UNPACKED_BYTES = 256 << 20
"""An archive that holds more is taken as the bytes that it is."""
_LONG_NUMBER = re.compile(rb"[0-9]{16}")


def media_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def query_form(query: str) -> list[list[str]]:
    """Return a query's members sorted by name; the order of equal names counts, and so does an empty value."""
    return sorted(([name, value] for name, value in parse_qsl(query, keep_blank_values=True)), key=lambda m: m[0])


def body_form(body: bytes, content_type: str, *, archives: bool = False) -> Any:
    """Return a body's form as a JSON value: JSON as what it says, a form by its members, all else by its digest.

    archives: whether files that are zip or tar archives are taken by their contents.
    """
    if not body:
        return None
    kind = media_type(content_type)
    if kind == "application/json" or kind.endswith("+json"):
        said = json_value(body)
        if said is not None:
            return {"json": said[0]}
    if kind == "application/x-www-form-urlencoded":
        try:
            return {"form": query_form(body.decode())}
        except ValueError:
            return _raw(body)
    if kind == "multipart/form-data":
        parts = multipart_form(body, content_type, archives=archives)
        if parts is not None:
            return {"parts": parts}
    return file_form(body) if archives else _raw(body)


def json_value(body: bytes) -> tuple[Any] | None:
    """Return what a JSON text says, with numbers that would lose digits as they are written; None for what is none."""
    try:
        if _LONG_NUMBER.search(body) is None:
            return (orjson.loads(body),)
        return (json.loads(body, parse_float=orjson.Fragment, parse_int=orjson.Fragment),)
    except ValueError:
        return None


def multipart_form(body: bytes, content_type: str, *, archives: bool = False) -> list[dict[str, Any]] | None:
    """Return the parts of a form in their order, without its boundary; None for what is no form."""
    head = b"Content-Type: " + content_type.encode("latin-1", "replace") + b"\r\n\r\n"
    message = BytesParser(policy=HTTP).parsebytes(head + body)
    if not message.is_multipart() or message.defects:
        return None
    form = file_form if archives else _raw
    return [_part(part, form) for part in message.iter_parts()]


def _part(part: Message, form: Callable[[bytes], Any]) -> dict[str, Any]:
    content = part.get_payload(decode=True)
    data = content if isinstance(content, bytes) else b""
    name = part.get_param("name", header="content-disposition")
    filename = part.get_filename()
    text = None if filename is not None else _text(data)
    return {"name": name, "filename": filename} | ({"text": text} if text is not None else {"file": form(data)})


def _text(data: bytes) -> str | None:
    try:
        return data.decode() if len(data) <= 1 << 16 else None
    except UnicodeDecodeError:
        return None


def file_form(data: bytes) -> Any:
    """Return what stands for a file: of a zip or tar archive names, modes and digests, sorted; of others a digest.

    Times, and the order of members, do not count.
    """
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
        _bounded(member.file_size for member in members)
        found = [[m.filename, m.external_attr >> 16, sha256(archive.read(m)).hexdigest()] for m in members]
    return sorted(found, key=lambda member: member[0])


def _tar_members(data: bytes) -> list[list[Any]]:
    found: list[list[Any]] = []
    size = 0
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            size += member.size
            _bounded([size])
            file = archive.extractfile(member) if member.isreg() else None
            digest = sha256(file.read()).hexdigest() if file is not None else ""
            kind = member.type.decode("latin-1")
            found.append([member.name, member.mode, kind, member.linkname, member.uname, digest])
    return sorted(found, key=lambda member: member[0])


def _bounded(sizes: Any) -> None:
    if sum(sizes) > MAX_UNPACKED_BYTES:
        raise ValueError("it holds too much")


def _raw(data: bytes) -> dict[str, str]:
    return {"sha256": sha256(data).hexdigest()}
