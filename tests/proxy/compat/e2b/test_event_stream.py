"""E2B: the stream of events to one client."""

import asyncio
from typing import Any

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.event_stream import MAX_UNSENT_BYTES, EventStream
from proxy.compat.e2b.responses import KEEPALIVE, started


class Client:
    """Receives the ASGI messages of a response."""

    def __init__(self) -> None:
        self.body = b""

    async def send(self, message: Any) -> None:
        self.body += message.get("body", b"")


def served(stream_of: Any) -> bytes:
    """Return the body of a stream to which `stream_of` put its events."""

    async def go() -> bytes:
        client = Client()
        stream = EventStream(client.send, keepalive_s=60.0, deadline_s=None)
        stream_of(stream)
        await stream.serve()
        return client.body

    return asyncio.run(go())


def test_events_are_sent_in_order_and_ended() -> None:
    """Events that were put before `serve` are sent, then the last envelope."""

    def put(stream: EventStream) -> None:
        stream.begin(7)
        stream.put(KEEPALIVE)
        stream.end()

    assert served(put) == connect.envelope(started(7)) + connect.envelope(KEEPALIVE) + connect.end()


def test_start_event_is_sent_once() -> None:
    """Several places may notice that the process runs; the client gets one start event."""

    def put(stream: EventStream) -> None:
        stream.begin(7)
        stream.begin(7)
        stream.end()

    assert served(put) == connect.envelope(started(7)) + connect.end()


def test_events_after_the_end_are_dropped() -> None:
    """Connect allows nothing after the last envelope, and only the first end counts."""

    def put(stream: EventStream) -> None:
        stream.end(ConnectError("unavailable", "x"))
        stream.put(KEEPALIVE)
        stream.end()

    assert served(put) == connect.end(ConnectError("unavailable", "x"))


def test_passed_deadline_ends_strict_stream() -> None:
    """A stream whose deadline has passed ends with Connect's error, without waiting."""

    async def go() -> bytes:
        client = Client()
        await EventStream(client.send, keepalive_s=60.0, deadline_s=-1.0).serve()
        return client.body

    assert asyncio.run(go()) == connect.end(ConnectError("deadline_exceeded", "context deadline exceeded"))


def test_client_too_far_behind_is_lost() -> None:
    """A client that reads nothing does not fill memory: its stream is closed."""

    async def go() -> tuple[bool, bool]:
        stream = EventStream(Client().send, keepalive_s=60.0, deadline_s=None)
        stream.put({"x": "a" * MAX_UNSENT_BYTES})
        return stream.closed, stream.lost.is_set()

    assert asyncio.run(go()) == (True, True)
