"""Parsing of large JSON texts."""

import gc
from typing import Any

import orjson


def parse_json(text: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text. Raises `orjson.JSONDecodeError`."""
    # A parser makes no garbage, but each 700 new lists and objects start a collection, which looks at those before them
    # again: 1 MB of empty lists took three times as long.
    if not gc.isenabled():
        return orjson.loads(text)
    gc.disable()
    try:
        return orjson.loads(text)
    finally:
        gc.enable()
