"""The Connect protocol with JSON: the envelopes of its streams, and its errors (pure).

An envelope is one byte of flags, the length in four bytes, then JSON. See https://connectrpc.com/docs/protocol.
"""

import struct
from typing import Any

import orjson

from proxy.refusals import Problem, RefusalError
from sandboxes.tool_clients.json_text import parse_json

STREAM = "application/connect+json"
UNARY = "application/json"
MAX_TIMEOUT_MS = 86_400_000
"""Longest timeout that is honoured, one day: the longest that E2B gives a sandbox."""
_HEADER = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
_STATUS = {
    "canceled": 499, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404, "already_exists": 409,
    "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400, "aborted": 409,
    "unimplemented": 501, "internal": 500, "unavailable": 503, "unauthenticated": 401, "unknown": 500,
}  # fmt: skip
"""The HTTP status for each Connect code, for responses that are not streams (Connect protocol, "Error codes")."""
_CODES = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 405: "unimplemented",
    409: "failed_precondition", 410: "not_found", 413: "resource_exhausted", 415: "invalid_argument",
    422: "invalid_argument", 429: "resource_exhausted", 500: "internal", 501: "unimplemented",
}  # fmt: skip
"""The Connect code for each HTTP status of a problem; any other status is `unavailable`."""


class ConnectError(Exception):
    """An error for a client that speaks Connect."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code  # Connect's error code, a key of `_STATUS`.

    @property
    def status(self) -> int:
        """The HTTP status of a response that consists of this error."""
        return _STATUS[self.code]

    @property
    def payload(self) -> dict[str, str]:
        """The error's JSON."""
        return {"code": self.code, "message": str(self)}


def from_problem(problem: Problem) -> ConnectError:
    """Return the Connect error for a problem. Failures of the proxy are `unavailable`, after which clients retry."""
    return ConnectError(_CODES.get(problem.status, "unavailable"), problem.detail)


def envelope(value: dict[str, Any]) -> bytes:
    """Return the envelope of one message of a stream."""
    return _envelope(0, value)


def end(error: ConnectError | None = None) -> bytes:
    """Return the last envelope of a stream."""
    return _envelope(_END, {} if error is None else {"error": error.payload})


def messages(body: bytes) -> list[dict[str, Any]]:
    """Return the messages of a whole request. Raises RefusalError (400) if it is cut off, compressed, or not JSON."""
    parsed = []
    start = 0
    while start < len(body):
        if len(body) - start < _HEADER.size:
            raise RefusalError(400, "envelope", "The request ends within the header of an envelope.")
        flags, length = _HEADER.unpack_from(body, start)
        start += _HEADER.size
        # Compression is negotiated, and this server offers none.
        if flags & _COMPRESSED:
            raise RefusalError(400, "envelope", "Compressed envelopes are not supported. Send them uncompressed.")
        if len(body) - start < length:
            missing = length - len(body) + start
            raise RefusalError(400, "envelope", f"The request is cut off: the last envelope lacks {missing} bytes.")
        # The end of a request's stream carries no message.
        if not flags & _END:
            parsed.append(message(body[start : start + length]))
        start += length
    return parsed


def message(text: bytes) -> dict[str, Any]:
    """Parse the JSON object of a message; an empty text is an empty one. Raises RefusalError (400) for others."""
    try:
        value = parse_json(text or b"{}")
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, "json", f"The message is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RefusalError(400, "json", "The message must be a JSON object.")
    return value


def timeout_s(header: str) -> float | None:
    """Return a `connect-timeout-ms` header in seconds; None if empty. Raises RefusalError (400) if it is no number."""
    if not header:
        return None
    if not (header.isascii() and header.isdigit() and len(header) <= 10):
        raise RefusalError(400, "timeout", "connect-timeout-ms must be milliseconds in at most 10 digits.")
    return min(int(header), MAX_TIMEOUT_MS) / 1000


def _envelope(flags: int, value: dict[str, Any]) -> bytes:
    text = orjson.dumps(value)
    return _HEADER.pack(flags, len(text)) + text
