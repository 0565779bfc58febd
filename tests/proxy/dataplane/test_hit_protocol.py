"""What uvicorn's protocol is made to do: an answer's head leaves with what is written next."""

import asyncio
from typing import cast

from proxy.dataplane.hit_protocol import Joining


class Sent:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.pieces.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joining() -> tuple[Sent, Joining]:
    sent = Sent()
    return sent, Joining(cast("asyncio.Transport", sent), asyncio.get_running_loop())


def test_an_answer_leaves_in_one_piece() -> None:
    async def go() -> None:
        sent, transport = joining()
        transport.write(b"head ")
        transport.write(b"body")
        assert sent.pieces == [b"head body"]
        transport.write(b"more")
        await asyncio.sleep(0)
        assert sent.pieces == [b"head body", b"more"]

    asyncio.run(go())


def test_a_head_without_a_body_leaves_a_moment_later_and_once() -> None:
    async def go() -> None:
        sent, transport = joining()
        transport.write(b"head")
        assert sent.pieces == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sent.pieces == [b"head"]
        transport.write(b"body")
        assert sent.pieces == [b"head", b"body"]

    asyncio.run(go())


def test_what_is_held_leaves_before_the_connection_is_closed() -> None:
    async def go() -> None:
        sent, transport = joining()
        transport.write(b"head")
        transport.close()
        assert (sent.pieces, sent.closed, transport.is_closing()) == ([b"head"], True, True)
        await asyncio.sleep(0)
        assert sent.pieces == [b"head"]

    asyncio.run(go())
