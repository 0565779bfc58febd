"""Database values as JSON and back, without loss (pure).

`None`, booleans, text, 64-bit integers and finite floats are JSON values. Every other value is a *tagged* value: an
object with one member, whose name is the tag. The tags are listed in `docs/sql.md`:

- `{"base64": …}` is a blob, and `{"text_base64": …}` is text that is not UTF-8.
- `{"float": "nan" | "inf" | "-inf"}` is a float that JSON lacks, and `{"decimal": "1.10"}` an exact number.
- `{"date": "2026-01-01"}`, `time`, `timestamp`, `interval`, `uuid` and `json` hold the text of their type.
"""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

Value = str | int | float | bool | dict[str, str] | None
"""A value in a result or in a call's `params`."""

_INTEGER_RANGE = range(-(1 << 63), 1 << 64)
"""Integers that common JSON readers keep exact: signed and unsigned 64 bits."""
TEXTUAL = frozenset({"decimal", "date", "time", "timestamp", "interval", "uuid", "json"})
"""Tags whose text an engine accepts as it is."""


def encode(value: Any) -> Value:
    """Encode a value that an engine returned (`bytes` are a blob); other types raise TypeError."""
    match value:
        case float() if not math.isfinite(value):
            return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        case int() if value not in _INTEGER_RANGE:
            return {"decimal": str(value)}
        case None | bool() | int() | float() | str() | dict():
            return value
        case bytes() | memoryview():
            return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is not a type of database values")


def encode_text(data: bytes) -> Value:
    """Encode text that an engine returned as bytes. SQLite does not check that text is UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"text_base64": base64.b64encode(data).decode()}


def decode(value: Value) -> str | int | float | bytes | bool | None:
    """Decode a parameter into the value that an engine takes, dates and decimals as text, or raise ValueError."""
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, text),) = value.items()
        try:
            if kind == "base64":
                return base64.b64decode(text, validate=True)
            if kind == "float":
                return float(text)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"a parameter {kind} cannot be read: {error}") from None
        if kind in TEXTUAL:
            return text
    raise ValueError(
        f'{value!r} is not a parameter: send a JSON scalar, {{"base64": …}}, {{"float": "nan"}} or one of '
        f"{', '.join(sorted(TEXTUAL))} with its text"
    )


def plain(value: Value) -> str | int | float | bool | None:
    """Return what text formats show of a value: a tagged value's text, and a blob as SQL's literal x'…'."""
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    if kind == "base64":
        return f"x'{base64.b64decode(text).hex()}'"
    if kind == "text_base64":
        return base64.b64decode(text).decode(errors="replace")
    return text
