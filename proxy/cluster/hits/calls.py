"""A call that its owner may know the answer to, and that answer, as bytes (pure).

The head of a request travels as its client sent it. Clients send the same head again and again, so the owner reads it
once (`Heads`). The content of a frame is a struct, and then the texts whose lengths it has.
"""

import struct
from typing import Any, NamedTuple

import httptools

from proxy.cluster.messages import Kind, MessageError
from proxy.cluster.protocol import Position
from proxy.dataplane.request_reader import END_OF_HEAD, RequestReader
from proxy.http.asgi import Scope
from proxy.http.lru_cache import LruCache

_CALL = struct.Struct("!QQQHIB")
_KNOWN = struct.Struct("!QQQI")
MAX_REMEMBERED_BYTES = 2048
"""Limits the heads that are remembered: with their parsed form, 8,192 of them take less than 64 MiB."""
MAX_REMEMBERED = 8192


class PassedCall(NamedTuple):
    """A request that its owner may answer from the tree.

    Attributes:
        task: Name of the task.
        view: The owner's view, as the ingress knows it.
        number: Number of the call among those of this start of the ingress.
        oldest: Number of the oldest call of the task that the ingress still waits for.
        head: What the head of the request says, as members of an ASGI scope.
        body: Its body.
    """

    task: str
    view: int
    number: int
    oldest: int
    head: Scope
    body: bytes

    @property
    def kind(self) -> str:
        """What the connection becomes."""
        return Kind.CALL

    def scope(self) -> Scope:
        """Return the ASGI scope of the request. It is a new one, which the caller may change."""
        return {**self.head, "headers": list(self.head["headers"]), "state": {}}


class KnownAnswer(NamedTuple):
    """The answer to a call that the tree knew.

    Attributes:
        view: View of the owner.
        rollout: Number of the rollout that the call moved.
        position: Where it is now.
        response: The whole HTTP response.
    """

    view: int
    rollout: int
    position: Position
    response: bytes


class Heads:
    """Reads heads of requests."""

    def __init__(self) -> None:
        self._known: LruCache[tuple[bytes, bool], Scope] = LruCache(MAX_REMEMBERED)

    def read(self, head: bytes, *, is_https: bool) -> Scope:
        """Return the ASGI scope of a request with this head, which callers must not change. 0.2 us if it is remembered.

        Raises:
            MessageError: It is no head of a request to an agents' endpoint.
        """
        known = self._known.get((head, is_https))
        if known is not None:
            return known
        reader = RequestReader()
        try:
            reader.feed(head + END_OF_HEAD)
        except httptools.HttpParserError as error:
            raise MessageError(f"a peer passed a malformed request on: {error}") from error
        scope: dict[str, Any] | None = None
        if reader.has_head and reader.is_plain:
            plain = reader.scope("https" if is_https else "http")
            scope = None if plain is None else dict(plain)
        if scope is None:
            raise MessageError("a peer passed a request on that is not a plain one")
        scope |= {"http_version": "1.1", "root_path": "", "server": None, "client": None}
        if len(head) <= MAX_REMEMBERED_BYTES:
            self._known[head, is_https] = scope
        return scope


def pack_call(view: int, number: int, oldest: int, task: bytes, head: bytes, body: bytes, *, is_https: bool) -> bytes:
    """Return a call as the content of a frame. 0.4 us."""
    return _CALL.pack(view, number, oldest, len(task), len(head), is_https) + task + head + body


def unpack_call(content: bytes, heads: Heads) -> PassedCall:
    """Return the call that a frame holds.

    Raises:
        MessageError: It holds none.
    """
    try:
        view, number, oldest, task_bytes, head_bytes, is_https = _CALL.unpack_from(content)
        start = _CALL.size + task_bytes
        end = start + head_bytes
        if end > len(content):
            raise MessageError("a peer's call is cut")
        task = content[_CALL.size : start].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise MessageError(f"a peer's call is malformed: {error}") from error
    head = heads.read(content[start:end], is_https=bool(is_https))
    return PassedCall(task, view, number, oldest, head, content[end:])


def pack_known(view: int, rollout: int, position: Position, response: bytes) -> bytes:
    """Return a `KnownAnswer` as the content of a frame."""
    return _KNOWN.pack(view, rollout, position.node, position.turn) + response


def unpack_known(content: bytes) -> KnownAnswer:
    """Return the answer that a frame holds.

    Raises:
        MessageError: It holds none.
    """
    try:
        view, rollout, node, turn = _KNOWN.unpack_from(content)
    except struct.error as error:
        raise MessageError(f"a peer's answer is malformed: {error}") from error
    return KnownAnswer(view, rollout, Position(turn, node), content[_KNOWN.size :])
