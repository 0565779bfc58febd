"""The Connect protocol with JSON: the envelopes of its streams, and its errors (pure).

A stream is a sequence of envelopes: a byte of flags, the length in four bytes, then JSON. The last is
flagged as such.
"""

import struct
from typing import Any

import orjson

from proxy.refusals import Problem, RefusalError

STREAM = "application/connect+json"
UNARY = "application/json"
MAX_TIMEOUT_MS = 86_400_000
_HEADER = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
_STATUS = {
    "canceled": 499, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404, "already_exists": 409,
    "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400, "aborted": 409,
    "unimplemented": 501, "internal": 500, "unavailable": 503, "unauthenticated": 401, "unknown": 500,
}  # fmt: skip
"""HTTP's word for each of Connect's codes, where an error is all of an answer."""
_CODES = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 405: "unimplemented",
    409: "failed_precondition", 410: "not_found", 413: "resource_exhausted", 415: "invalid_argument",
    422: "invalid_argument", 429: "resource_exhausted", 500: "internal", 501: "unimplemented",
}  # fmt: skip


class ConnectError(Exception):
    """An error of this code, for a client that speaks Connect."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def status(self) -> int:
        return _STATUS[self.code]

    @property
    def told(self) -> dict[str, str]:
        """What the client is told, as JSON."""
        return {"code": self.code, "message": str(self)}


def of_problem(problem: Problem) -> ConnectError:
    """Return a problem as Connect has it; trouble of ours is `unavailable`, on which its clients may try again."""
    return ConnectError(_CODES.get(problem.status, "unavailable"), problem.detail)


def envelope(value: dict[str, Any]) -> bytes:
    """Return one message of a stream."""
    return _enveloped(0, value)


def end(error: ConnectError | None = None) -> bytes:
    """Return the last envelope of a stream."""
    return _enveloped(_END, {} if error is None else {"error": error.told})


def messages(body: bytes) -> list[dict[str, Any]]:
    """Return what the envelopes of a whole request say.

    Raises:
        Refused: 400, it is cut off, compressed, or no JSON.
    """
    found = []
    at = 0
    while at < len(body):
        if len(body) - at < _HEADER.size:
            raise RefusalError(400, "envelope", "the request ends within the head of an envelope.")
        flags, length = _HEADER.unpack_from(body, at)
        at += _HEADER.size
        if flags & _COMPRESSED:
            raise RefusalError(400, "envelope", "compressed envelopes are not understood: send them as they are.")
        if len(body) - at < length:
            raise RefusalError(400, "envelope", f"the request ends {length - len(body) + at} bytes within an envelope.")
        if not flags & _END:
            found.append(message(body[at : at + length]))
        at += length
    return found


def message(text: bytes) -> dict[str, Any]:
    """Return what the JSON object of a message says; no bytes are an empty one.

    Raises:
        Refused: 400, it is none.
    """
    try:
        value = orjson.loads(text or b"{}")
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, "json", f"a message is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RefusalError(400, "json", "a message must be a JSON object.")
    return value


def timeout_s(header: str) -> float | None:
    """Return what `connect-timeout-ms` allows; None where it is empty.

    Raises:
        Refused: 400, it is no number of milliseconds.
    """
    if not header:
        return None
    if not (header.isascii() and header.isdigit() and len(header) <= 10):
        raise RefusalError(400, "timeout", "connect-timeout-ms must be a number of milliseconds, of at most 10 digits.")
    return min(int(header), MAX_TIMEOUT_MS) / 1000


def _enveloped(flags: int, value: dict[str, Any]) -> bytes:
    text = orjson.dumps(value)
    return _HEADER.pack(flags, len(text)) + text
