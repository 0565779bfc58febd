"""Values of a database as JSON and back, losing nothing (pure).

`None`, booleans, text, integers of 64 bits and finite floats are themselves. What JSON cannot say is an object with
one member that names its kind: `{"base64": …}` (a blob), `{"float": "nan" | "inf" | "-inf"}`, `{"decimal": "1.10"}`,
`{"date": "2026-01-01"}`, `time`, `timestamp`, `interval`, `uuid`, `{"json": "<its text>"}`, and `{"text_base64": …}`
for text that is not UTF-8. `docs/sql.md` shows them.
"""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

Value = str | int | float | bool | dict[str, str] | None
"""A value as it stands in an answer or in `params`."""

_LARGEST = 1 << 64
TEXTUAL = frozenset({"decimal", "date", "time", "timestamp", "interval", "uuid", "json"})
"""Tags whose text is what an engine understands too."""


def encode(value: Any) -> Value:
    """Return a value that an engine gave as JSON can carry it. `bytes` are a blob; what has a tag already keeps it."""
    match value:
        case float() if not math.isfinite(value):
            return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        case int() if not -_LARGEST // 2 <= value < _LARGEST:
            return {"decimal": str(value)}
        case None | bool() | int() | float() | str() | dict():
            return value
        case bytes() | memoryview():
            return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is no value of a database")


def encode_text(data: bytes) -> Value:
    """Return text that an engine gave as bytes; not all of them are UTF-8 in a database that does not check."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"text_base64": base64.b64encode(data).decode()}


def decode(value: Value) -> str | int | float | bytes | bool | None:
    """Return a parameter as an engine takes it; dates, decimals and the like as their text.

    Raises:
        ValueError: it is no value that a parameter can have; the message says what is.
    """
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
        f'{value!r} is no parameter: send a JSON scalar, {{"base64": …}}, {{"float": "nan"}} or one of '
        f"{', '.join(sorted(TEXTUAL))} with its text"
    )


def plain(value: Value) -> str | int | float | bool | None:
    """Return what a text format shows of a value: a tag's text without the tag, a blob in SQL's own x'…'."""
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    if kind == "base64":
        return f"x'{base64.b64decode(text).hex()}'"
    if kind == "text_base64":
        return base64.b64decode(text).decode(errors="replace")
    return text
