"""The cache of recorded answers as HTTP responses, within a budget of bytes."""

import operator
from dataclasses import dataclass
from http import HTTPStatus

from proxy.http.lru_cache import LruCache
from proxy.refusals import MARKS_HEADER
from proxy.storage.records import RecordStore
from proxy.tree.tree import Record
from sandboxes.calls import ResourceUse, ToolResult
from sandboxes.http_message import of_tool_server
from sandboxes.listener import Headers

RawHeaders = list[tuple[bytes, bytes]]
"""Header names and values as bytes, in the order in which they are sent."""

HIT_STATUS = b"forkpoint; hit"
"""The value of `Cache-Status` (RFC 9211) on a hit."""

_NO_TIME = b"tool;dur=0, restore;dur=0, replay;dur=0, wait;dur=0"
"""The times of a hit: no tool ran, and nothing was restored."""
_HIT_HEADERS = 2
"""The number of headers that `hit_headers` returns."""
_PARTS = operator.methodcaller("partition", b": ")
_OVERHEAD_BYTES = 250
"""The memory of one answer beside the bytes of its response: objects, and its entry in the cache (tracemalloc)."""
_LOCATIONS = frozenset({b"location", b"content-location", b"set-cookie"})
"""Headers that hold a URL or a path, which differs from client to client."""


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """A recorded answer, ready to be sent. It is held once: what only misses need is cut out of the whole response."""

    status: int
    hit: bytes  # The whole HTTP response to a hit.
    body_at: int  # Where in `hit` the body begins.
    resources: bytes  # What `Server-Timing` says of the execution that was recorded; it begins with a comma, if at all.
    own: int  # The number of the answer's own headers.
    has_location: bool  # Whether a header holds a URL or a path, so that each client needs its own form of the answer.
    model_tokens: int = 0  # Tokens that models counted while the call ran; see `ToolResult.model_tokens`.

    @property
    def headers(self) -> RawHeaders:
        """The answer's own headers, then the proxy's that every use of the answer shares. A new list."""
        # Without the status line, the headers of a hit, and the two empty lines before the body.
        lines = self.hit[: self.body_at].split(b"\r\n")[1 : -2 - _HIT_HEADERS]
        return [(name, value) for name, _, value in map(_PARTS, lines)]

    @property
    def marks(self) -> Headers:
        """The header with the marks of the call; none without marks."""
        return tuple((name.decode(), value.decode()) for name, value in self.headers if name == MARKS_HEADER)

    @property
    def hit_headers(self) -> RawHeaders:
        """The proxy's own headers on a hit. A new list."""
        return hit_headers(self.resources)

    @property
    def body(self) -> bytes:
        """The body, as a copy."""
        return self.hit[self.body_at :]


class Answers:
    """The cache of answers, in memory of `budget_bytes`, over those of the store."""

    def __init__(self, records: RecordStore, *, budget_bytes: int) -> None:
        self._records = records
        self._ready: LruCache[int, PreparedAnswer] = LruCache(
            budget_bytes, lambda ready: len(ready.hit) + len(ready.resources) + _OVERHEAD_BYTES
        )

    @property
    def used_bytes(self) -> int:
        """The memory that cached answers use."""
        return self._ready.used

    def of(self, record: Record) -> PreparedAnswer:
        """Return the answer of a record. Raises StoreError if the store does not hold the answer."""
        ready = self._ready.get(record.id)
        if ready is not None:
            self._ready.move_to_end(record.id)
            return ready
        return self.keep(record, self._records.result(record))

    def keep(self, record: Record, result: ToolResult) -> PreparedAnswer:
        """Return the answer of a record whose result is at hand, and keep it in the cache."""
        headers = raw(of_tool_server(result.headers)) if result.headers else []
        # Imported answers, and those of other packages' drivers, were not read by our clients.
        if not result.headers and result.status not in (204, 304):
            headers += [(b"content-type", result.media_type.encode()), (b"content-length", b"%d" % len(result.body))]
        own = len(headers)
        headers.append((b"x-forkpoint-node", b"n%d" % record.target.id))
        if result.marks:
            headers.append((MARKS_HEADER, ", ".join(result.marks).encode()))
        resources = timing_of(self._records.resources(record))
        hit = response(result.status, headers + hit_headers(resources), result.body)
        has_location = not _LOCATIONS.isdisjoint(name for name, _ in headers[:own])
        body_at = len(hit) - len(result.body)
        ready = PreparedAnswer(result.status, hit, body_at, resources, own, has_location, result.model_tokens)
        self._ready[record.id] = ready
        return ready


def hit_headers(resources: bytes = b"") -> RawHeaders:
    """Return the proxy's own headers on a hit, with what the recorded execution used (`timing_of`)."""
    return [(b"cache-status", HIT_STATUS), (b"server-timing", _NO_TIME + resources)]


def timing_of(used: ResourceUse | None) -> bytes:
    """Return what `Server-Timing` says of what an execution used; what is not known is left out."""
    if used is None:
        return b""
    cpu = b"" if used.cpu_s is None else b", cpu;dur=%.3f" % (used.cpu_s * 1000)
    amounts = ((b"memory", used.peak_bytes), (b"read", used.read_bytes), (b"written", used.written_bytes))
    # A description, because a duration would mean milliseconds.
    return cpu + b"".join(b", %b;desc=%d" % (name, amount) for name, amount in amounts if amount is not None)


def response(status: int, headers: RawHeaders, body: bytes) -> bytes:
    """Return the bytes of a whole HTTP response."""
    head = b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))
    return head + b"".join(map(b"%b: %b\r\n".__mod__, headers)) + b"\r\n" + body


def raw(headers: Headers) -> RawHeaders:
    """Return headers as bytes, with names in lower case."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
