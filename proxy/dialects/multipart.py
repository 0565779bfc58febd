"""The files of a multipart form, byte for byte (pure)."""

import re
from dataclasses import dataclass

from proxy.refusals import RefusalError

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_FILENAME = re.compile(rb'filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_ESCAPED = re.compile(rb"\\(.)")


@dataclass(frozen=True, slots=True)
class FormFile:
    """One part of a form that is a file."""

    name: str
    data: bytes


def files(body: bytes, content_type: str) -> list[FormFile]:
    """Return the files of a form in their order.

    Raises:
        Refused: 400, it has no boundary, is cut off, or names a file in what is no UTF-8.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise RefusalError(400, "multipart", "the form says no boundary.")
    mark = b"--" + (found[1] or found[2]).encode("latin-1")
    # Each boundary but the first follows the line end that ends the part before it.
    parts = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RefusalError(400, "multipart", "the form ends before its last boundary.")
    return [file for part in parts[1:-1] if (file := _file(part)) is not None]


def _file(part: bytes) -> FormFile | None:
    head, blank, data = part.partition(b"\r\n\r\n")
    if not blank:
        raise RefusalError(400, "multipart", "a part of the form has no end to its headers.")
    name = _FILENAME.search(head)
    if name is None:
        return None
    try:
        return FormFile(_ESCAPED.sub(rb"\1", name[1]).decode(), data)
    except UnicodeDecodeError:
        raise RefusalError(400, "multipart", "a file's name is not UTF-8.") from None
