"""Parsing of large JSON texts, and of large integers in them."""

import gc
import json
import re
from typing import Any

import orjson

_LONG_NUMBER = re.compile(rb"[0-9]{19}")


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


def exceeds_64_bits(text: bytes) -> bool:
    """Return whether a JSON text has an integer beyond 64 bits, which `parse_json` would silently turn into a float."""
    if _LONG_NUMBER.search(text) is None:
        return False
    try:
        # The one keeps all digits of an integer, and the other refuses what is longer. Both are one call in C.
        orjson.dumps(json.loads(text))
    except orjson.JSONEncodeError as error:
        return "Recursion" not in str(error)
    except (RecursionError, ValueError):
        return False
    return False
