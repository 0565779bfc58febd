"""Recorded answers, ready to be sent: read from the store once, then held in memory while they are used."""

from dataclasses import dataclass
from http import HTTPStatus

from proxy.http.lru_cache import LruCache
from proxy.storage.records import RecordStore
from proxy.tree.tree import Record

RawHeaders = list[tuple[bytes, bytes]]

HIT_STATUS = b"forkpoint; hit"

AT_ONCE: RawHeaders = [
    (b"cache-status", HIT_STATUS),
    (b"server-timing", b"tool;dur=0, restore;dur=0, replay;dur=0, wait;dur=0"),
]
_OVERHEAD_BYTES = 1200
"""What one answer costs in memory beside its body."""


_PLACED = frozenset({"location", "content-location", "set-cookie"})


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer's status, the headers that every use of it shares, its body, and a hit's whole response on the wire.

    told: how many of the headers tell of the answer itself; they come first. placed: whether one of them names a place,
    so that each client needs its own form of it.
    """

    status: int
    headers: RawHeaders
    body: bytes
    hit: bytes
    told: int
    placed: bool


class Answers:
    """The answers used last, within a budget of bytes."""

    def __init__(self, records: RecordStore, *, budget_bytes: int) -> None:
        self._records = records
        # Each answer holds its body twice: alone, and in the whole response.
        self._ready: LruCache[int, Ready] = LruCache(budget_bytes, lambda ready: 2 * len(ready.body) + _OVERHEAD_BYTES)

    @property
    def used_bytes(self) -> int:
        return self._ready.used

    def of(self, record: Record) -> Ready:
        """Return the answer of record. 0.2 us when it is ready, 10 us for 2 kB from the store.

        Raises:
            StoreError: the store does not hold it.
        """
        ready = self._ready.get(record.id)
        if ready is not None:
            self._ready.move_to_end(record.id)
            return ready
        result = self._records.result(record)
        headers: RawHeaders = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in result.headers
        ]
        if not result.headers and result.status not in (204, 304):
            headers += [(b"content-type", result.media_type.encode()), (b"content-length", b"%d" % len(result.body))]
        told = len(headers)
        headers.append((b"x-forkpoint-node", b"n%d" % record.target.id))
        hit = response(result.status, headers + AT_ONCE, result.body)
        placed = any(name.lower() in _PLACED for name, _ in result.headers)
        ready = Ready(result.status, headers, result.body, hit, told, placed)
        self._ready[record.id] = ready
        return ready


def response(status: int, headers: RawHeaders, body: bytes) -> bytes:
    """Return a whole response as it is on the wire."""
    head = b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))
    return head + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + body


_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
