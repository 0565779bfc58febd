"""Connections that another process answers: which request decides, and when the connection leaves."""

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import cast

from proxy.dataplane.handover import Handover, first_scope, give_when_sent


def test_first_request_decides() -> None:
    """The connection goes to its worker, whatever comes behind it."""
    held = b"GET /t/a/x HTTP/1.1\r\nhost: h\r\n\r\nGET /t/b/x HTTP/1.1\r\nhost: h\r\n\r\n"
    scope = first_scope(held, "http")
    assert scope is not None
    assert (scope["raw_path"], scope["headers"]) == (b"/t/a/x", [(b"host", b"h")])


def test_other_bytes_have_no_scope() -> None:
    assert first_scope(b"\x16\x03\x01\r\n\r\nGET / HTTP/1.1\r\n\r\n", "http") is None


def test_connection_leaves_once_its_client_has_read() -> None:
    """What is still in the buffer of this process would never reach the client."""

    async def go() -> None:
        ours, client = socket.socketpair()
        unsent, given, events = [5, 0], asyncio.Event(), list[object]()

        def give(process: int, connection: socket.socket, held: bytes) -> None:
            events.extend((process, held, os.fstat(connection.fileno()).st_ino))
            connection.close()
            given.set()

        transport = SimpleNamespace(
            is_closing=lambda: False,
            pause_reading=lambda: events.append("paused"),
            get_write_buffer_size=lambda: unsent.pop(0),
            get_extra_info=lambda _: ours,
            abort=lambda: events.append("closed"),
        )
        receiver = SimpleNamespace(give=give)
        give_when_sent(cast("Handover", receiver), 3, cast("asyncio.Transport", transport), b"GET")
        assert events == ["paused"]
        async with asyncio.timeout(30):
            await given.wait()
        assert events == ["paused", "paused", 3, b"GET", os.fstat(ours.fileno()).st_ino, "closed"]
        ours.close()
        client.close()

    asyncio.run(go())
