"""Forms of the type `multipart/form-data` (RFC 7578) as lists of their parts. The door to multipart (pure)."""

import re
from dataclasses import dataclass

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser, parse_options_header

from proxy.refusals import RefusalError

MAX_PARTS = 10_000
"""Limits the parts of one form. One E2B upload sends many files, and hits wait while a form is read."""
MAX_PART_HEADERS = 32
"""Limits the headers of one part. RFC 7578 defines three."""
MAX_HEADER_BYTES = 16 << 10
"""Limits one header of a part. The longest is a `Content-Disposition` with a path of 4,095 escaped bytes."""
_ESCAPED = re.compile(r"\\(.)")


class MalformedFormError(RefusalError):
    """A form has no boundary, is cut off, has a malformed header, or exceeds a limit."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """One part of a form."""

    headers: tuple[tuple[str, str], ...]  # The part's own, in the order of the form, with names in lower case.
    name: str  # The name of the form's field; empty if the part has none.
    filename: str | None  # With backslash escapes undone; None for a part that is not a file.
    data: bytes  # The content, byte for byte.


def parts(body: bytes, content_type: str) -> list[FormPart]:
    """Return the parts of a form in their order. Raises MalformedFormError (400 or 413; see there)."""
    boundary = parse_options_header(content_type)[1].get("boundary", "")
    form: list[FormPart] = []
    delimiter = boundary.encode("latin-1", "replace")
    try:
        with PushMultipartParser(
            delimiter, max_header_size=MAX_HEADER_BYTES,
            max_header_count=MAX_PART_HEADERS, max_segment_count=MAX_PARTS,
        ) as parser:  # fmt: skip
            segment, data = None, b""
            for event in parser.parse(body) if body else ():
                # The parser yields a segment (its headers), its content in chunks, and None at its end.
                if isinstance(event, MultipartSegment):
                    segment, data = event, b""
                elif event is not None:
                    data += event
                elif segment is not None:
                    if b"\n--" + delimiter in b"\n" + data:
                        # Parsers disagree on whether a part ends there (RFC 2046, 5.1.1, forbids it).
                        raise MalformedFormError(
                            400, "multipart", "the form cannot be read: a part holds its boundary."
                        )
                    form.append(_part(segment, data))
    except MultipartError as error:
        status = 413 if isinstance(error, ParserLimitReached) else 400
        raise MalformedFormError(status, "multipart", f"the form cannot be read: {error.args[0]}.") from None
    return form


def files(body: bytes, content_type: str) -> list[FormPart]:
    """Return the parts of a form that are files, in their order. Errors as for `parts`."""
    return [part for part in parts(body, content_type) if part.filename is not None]


def _part(segment: MultipartSegment, data: bytes) -> FormPart:
    headers = tuple((name.lower(), value) for name, value in segment.headerlist)
    disposition = next((value for name, value in headers if name == "content-disposition"), "")
    # The library's own unquoting guesses between three browsers' habits, and cuts Windows paths. Tool servers
    # undo backslash escapes (RFC 9110, 5.6.4), and nothing else.
    options = parse_options_header(disposition, unquote=_unquoted)[1]
    return FormPart(headers, options.get("name", ""), options.get("filename"), data)


def _unquoted(value: str, _is_filename: bool) -> str:
    return _ESCAPED.sub(r"\1", value[1:-1]) if value.startswith('"') else value
