"""A call that its owner may know the answer to, and that answer, as bytes (pure).

The head of a request travels as its client sent it. Clients send the same head again and again, so the owner reads it
once (`Heads`).
"""

from typing import Any, NamedTuple

import httptools

from proxy.cluster.messages import Kind
from proxy.cluster.protocol import Position
from proxy.dataplane.request_reader import END_OF_HEAD, RequestReader
from proxy.http.asgi import Scope
from proxy.http.lru_cache import LruCache
from sandboxes.ipc.codec import IpcMessage, decode_bytes
from sandboxes.ipc.frames import MalformedFrameError

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


class HeadCall(IpcMessage, op="head_call"):
    """A `PassedCall` with its head as the client sent it, up to the blank line; is_https: what it came over."""

    task: str
    view: int
    number: int
    oldest: int
    head: bytes
    is_https: bool
    body: bytes


class KnownAnswer(IpcMessage, op="known_answer"):
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
            MalformedFrameError: It is no head of a request to an agents' endpoint.
        """
        known = self._known.get((head, is_https))
        if known is not None:
            return known
        reader = RequestReader()
        try:
            reader.feed(head + END_OF_HEAD)
        except httptools.HttpParserError as error:
            raise MalformedFrameError(f"a peer passed a malformed request on: {error}") from error
        scope: dict[str, Any] | None = None
        if reader.has_head and reader.is_plain:
            plain = reader.scope("https" if is_https else "http")
            scope = None if plain is None else dict(plain)
        if scope is None:
            raise MalformedFrameError("a peer passed a request on that is not a plain one")
        scope |= {"http_version": "1.1", "root_path": "", "server": None, "client": None}
        if len(head) <= MAX_REMEMBERED_BYTES:
            self._known[head, is_https] = scope
        return scope


def passed_call(content: bytes, heads: Heads) -> PassedCall:
    """Return the call that a frame holds.

    Raises:
        MalformedFrameError: It holds none.
    """
    call = decode_bytes(content, HeadCall)
    head = heads.read(call.head, is_https=call.is_https)
    return PassedCall(call.task, call.view, call.number, call.oldest, head, call.body)
