"""JSON bytes of SQL results, equal in every process (pure).

Workers and the guest, which loads only the standard library, must answer with equal bytes, also as replays of answers
that orjson wrote in earlier versions. So floats have the form of orjson 3.13, which differs from Python's:

- An exponent has no leading zero: `1e-7`, where Python writes `1e-07`.
- A magnitude from 1e-5 up to 1e-4 has no exponent: `0.00001`.
- NaN and infinities are `null`. Database values never get that far: `sandboxes.sql.values.encode` tags them.
"""

import math
from json.encoder import encode_basestring
from typing import Any


def json_bytes(value: Any) -> bytes:
    r"""Encode a result as compact UTF-8 JSON. Raises TypeError for other values than JSON's.

    Lone surrogates, which UTF-8 cannot carry, become JSON escapes such as `\ud800`.
    """
    # Python's escape of a surrogate (a backslash, "u" and four hexadecimal digits) is also the one of JSON.
    return _text(value).encode(errors="backslashreplace")


def _text(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring(value)
    if value is None:
        return "null"
    if kind is int:
        return str(value)
    if kind is float:
        return _float_text(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is list:
        return "[" + ",".join([_text(item) for item in value]) + "]"
    if kind is dict:
        return "{" + ",".join([f"{encode_basestring(key)}:{_text(item)}" for key, item in value.items()]) + "}"
    raise TypeError(f"a result cannot contain a {kind.__name__}: encode it as a database value first")


def _float_text(value: float) -> str:
    """Return a float as orjson writes it: the shortest digits that read back as the same float."""
    if not math.isfinite(value):
        return "null"
    mantissa, e, exponent = repr(value).partition("e")
    if not e:
        return mantissa
    if exponent == "-05":
        sign = "-" if value < 0 else ""
        return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"
    return f"{mantissa}e{int(exponent):+}"
