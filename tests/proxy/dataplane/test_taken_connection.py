"""Connections that become streams."""

import asyncio
import contextlib

import httptools
import pytest

from proxy.dataplane.request_reader import RequestReader
from proxy.dataplane.taken_connection import TakenConnection, split_request

HEAD = b"POST /exec HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n%b\r\n"
UPGRADE = b"connection: Upgrade\r\nupgrade: tcp\r\n"


@pytest.mark.parametrize(
    ("rest", "expected"), [(b"bod", None), (b"body", (b"body", b"")), (b"bodyin", (b"body", b"in"))]
)
def test_body_behind_an_upgrade_ends_at_its_length(rest: bytes, expected: tuple[bytes, bytes] | None) -> None:
    reader, head = RequestReader(), HEAD % UPGRADE
    with contextlib.suppress(httptools.HttpParserUpgrade):
        reader.feed(head + rest)
    assert split_request(reader, head + rest, len(head)) == expected


@pytest.mark.parametrize(("body", "expected"), [(b"bod", None), (b"body", (b"body", b""))])
def test_request_without_an_upgrade_is_whole_when_it_ended(body: bytes, expected: tuple[bytes, bytes] | None) -> None:
    reader = RequestReader()
    reader.feed(HEAD % b"" + body)
    assert split_request(reader, HEAD % b"" + body, None) == expected


class Client(asyncio.Transport):
    """Records how often reading stops and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.events.append("pause")

    def resume_reading(self) -> None:
        self.events.append("resume")


def test_fast_client_is_stopped_once() -> None:
    async def go() -> None:
        client = Client()
        stream = TakenConnection(client, asyncio.Event()).transport
        for on in (False, True, True, False):
            stream.hold(on)
        assert client.events == ["pause", "resume"]

    asyncio.run(go())
