"""A host outside for tests: scripted bytes at a loopback port, and a dialer that leads its public names there."""

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from sandboxes.egress.dialing import Dialer
from sandboxes.egress.dialing import connect as really_connect

ADDRESS = "93.184.215.14"
"""A public address, which no test really connects to."""


def response(body: bytes = b"hello", head: str = "HTTP/1.1 200 OK", headers: str = "") -> bytes:
    return f"{head}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class Origin:
    """Answers each connection with what `answers` says, after it has read a head; notes what it was sent."""

    def __init__(self, answer: Callable[[int], bytes], *, hangs: bool = False) -> None:
        self.received: list[bytes] = []
        self.answer, self._hangs, self.port = answer, hangs, 0
        self._served: set[asyncio.StreamWriter] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.received.append(head)
            writer.write(self.answer(len(self.received)))
            await writer.drain()
            if self._hangs:
                await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self._served.discard(writer)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Origin"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            # A connection that was accepted in this turn of the loop is served in one of the next.
            for _ in range(4):
                await asyncio.sleep(0)
            served = list(self._served)
            for writer in served:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in served), return_exceptions=True)

    def dialer(self, *answers: list[str]) -> Dialer:
        """Resolve any name to ADDRESS, or to each of the answers in turn; connect to the origin and nowhere else."""
        turns = itertools.cycle(answers or ([ADDRESS],))

        async def resolve(_name: str) -> list[str]:
            return next(turns)

        async def connect(address: str, _port: int) -> socket.socket:
            assert address == ADDRESS, f"connected to {address}"
            return await really_connect("127.0.0.1", self.port)

        return Dialer(resolve, connect)


def main() -> None:
    """Be an egress proxy, in the place of `sandboxes.egress.process`, whose names lead to `ORIGIN_FILE`'s port."""
    from sandboxes.egress.process import serve  # noqa: PLC0415 - loaded in the process only

    port_file = Path(sys.argv[2]).parent / "origin-port"
    port = int(port_file.read_text())

    async def resolve(name: str) -> list[str]:
        return ["127.0.0.1"] if name == "rebound.example.org" else [ADDRESS]

    async def connect(address: str, _port: int) -> socket.socket:
        if address != ADDRESS:
            os.abort()
        return await really_connect("127.0.0.1", port)

    serve(Dialer(resolve, connect))
