"""Parsing of large JSON texts."""

import gc
from typing import Any

import orjson


def parse_json(text: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text, without garbage collections: a parser makes no garbage, but starts many."""
    if not gc.isenabled():
        return orjson.loads(text)
    gc.disable()
    try:
        return orjson.loads(text)
    finally:
        gc.enable()
