"""PostgreSQL's text form of values as JSON, losing nothing (pure).

The text form is the server's own and carries every value (infinite dates, years before Christ, any precision), which
Python's types do not.
"""

from collections.abc import Callable

from sandboxes.sql.values import Value, decode, encode

_INTEGERS = {20: "int8", 21: "int2", 23: "int4", 26: "oid"}
_FLOATS = {700: "float4", 701: "float8"}
_TAGGED = {
    114: "json", 3802: "json", 1082: "date", 1083: "time", 1266: "time", 1114: "timestamp", 1184: "timestamp",
    1186: "interval", 1700: "decimal", 2950: "uuid",
}  # fmt: skip
"""Types by their fixed object ids (server source, `pg_type.dat`)."""


def reader_of(oid: int) -> Callable[[str], Value]:
    """Return what turns a column's text into a JSON value, by the object id of its type.

    Integers are JSON integers, finite floats numbers, booleans booleans, text strings; `{"decimal": "1.10"}`, `{"date":
    …}` and the like where JSON has no such value; of all other types (arrays, ranges, enums) the server's text.
    """
    if oid in _INTEGERS:
        return int
    if oid in _FLOATS:
        return _float
    if oid == 16:
        return lambda text: text == "t"
    if oid == 17:
        return _bytes
    if oid in _TAGGED:
        tag = _TAGGED[oid]
        return lambda text: {tag: text}
    return str


def _float(text: str) -> Value:
    return encode(float(text))


def _bytes(text: str) -> Value:
    return encode(bytes.fromhex(text.removeprefix("\\x")))


def parameter(value: Value) -> bytes | None:
    """Return a value of a call's `params` in the server's text form.

    Raises:
        ValueError: it is no value that a parameter can have.
    """
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
