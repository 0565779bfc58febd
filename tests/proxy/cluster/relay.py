"""What carries connections to a server, and stops carrying what the server sends when a test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandboxes.task_owner import TaskOwner


class Relay:
    """Carries connections to a server of this machine.

    Attributes:
        port: Its port.
        left_bytes: How many more bytes of the server it passes on; None for all.
        closes: Whether a connection ends when no more are passed on. Otherwise it is silent.
        accepted: How many connections were made.
    """

    def __init__(self, server_port: int) -> None:
        self.port = self.accepted = 0
        self.left_bytes: int | None = None
        self.closes = False
        self._server_port, self._tasks = server_port, TaskOwner()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        """Accept connections while the context lasts."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._tasks.cancel()
            await self._tasks.wait()
            # The transports that were closed end in the next turn of the loop.
            await asyncio.sleep(0)

    def dsn(self, direct: str) -> str:
        """Return a connection string that leads through the relay."""
        return direct.replace(f"port={self._server_port} ", f"port={self.port} ")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._tasks.spawn("connection", self._carry(reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
            with contextlib.closing(to_server):
                back = self._tasks.spawn("back", self._back(from_server, writer))
                while data := await reader.read(65536):
                    to_server.write(data)
                back.cancel()

    async def _back(self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await from_server.read(65536):
                passed = data if self.left_bytes is None else data[: self.left_bytes]
                if self.left_bytes is not None:
                    self.left_bytes -= len(passed)
                writer.write(passed)
                if self.left_bytes == 0 and self.closes:
                    break
            writer.close()
