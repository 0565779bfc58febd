"""Values in PostgreSQL's text form, which carries every value, as JSON and back without loss (pure)."""

import re
from collections.abc import Callable

from sandboxes.sql.values import Value, decode, encode

_INTEGERS = {20: "int8", 21: "int2", 23: "int4", 26: "oid"}
_FLOATS = {700: "float4", 701: "float8"}
_TAGGED = {
    114: "json", 3802: "json", 1082: "date", 1083: "time", 1266: "time", 1114: "timestamp", 1184: "timestamp",
    1186: "interval", 1700: "decimal", 2950: "uuid",
}  # fmt: skip
"""Tags of types by the types' fixed object ids (server source, `pg_type.dat`)."""


def reader_of(oid: int) -> Callable[[str], Value]:
    """Return the function that converts a column's text into JSON: numbers, booleans, tagged values, or text."""
    if oid in _INTEGERS:
        return int
    if oid in _FLOATS:
        return lambda text: encode(float(text))
    if oid == 16:
        return lambda text: text == "t"
    if oid == 17:
        return _bytes
    if oid in _TAGGED:
        tag = _TAGGED[oid]
        return lambda text: {tag: text}
    return str


def _bytes(text: str) -> Value:
    if text.startswith("\\x"):
        return encode(bytes.fromhex(text[2:]))
    # The form of `bytea_output = 'escape'` (PostgreSQL's manual, 8.4.2).
    escaped = re.sub(rb"\\(\\|[0-7]{3})", lambda match: _unescaped(match[1]), text.encode())
    return encode(escaped)


def _unescaped(escape: bytes) -> bytes:
    return escape if escape == b"\\" else bytes([int(escape, 8)])


def parameter(value: Value) -> bytes | None:
    """Convert a value of a call's `params` into the server's text form; None is NULL. ValueError: it has none."""
    match decode(value):
        case None:
            return None
        case bool(truth):
            return b"t" if truth else b"f"
        case bytes(data):
            return b"\\x" + data.hex().encode()
        case str(text):
            return text.encode()
        case number:
            return repr(number).encode()
