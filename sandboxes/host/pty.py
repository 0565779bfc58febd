"""The proxy's end of a terminal in a sandbox."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

from sandboxes.linux.descriptors import set_size

_CHUNK = 1 << 16
"""How much output is read at once."""


class Pty:
    """The master end of a terminal; an implementation of `sandboxes.inspection.Terminal`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()

    async def read(self) -> bytes:
        """Return the next output; empty once no process has the terminal open any more."""
        # Looked at in each round: `close` may come while a read waits.
        while self._fd >= 0:
            try:
                data = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                # Nothing to read: the loop watches the terminal, and `close` wakes this wait as well.
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except OSError:
                # EIO: no process has the other end open any more.
                return b""
            else:
                # A program may write faster than this end reads, and then nothing here would ever wait.
                await asyncio.sleep(0)
                return data
        return b""

    async def write(self, data: bytes) -> None:
        """Type at the terminal."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            # The other end is closed, which a reader sees as the end of the output.
            except OSError:
                return

    def resize(self, columns: int, rows: int) -> None:
        """Set the size in characters."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                set_size(self._fd, columns, rows)

    def close(self) -> None:
        """Close this end. Idempotent; pending reads end."""
        # The number is forgotten before the descriptor is closed, because the system gives it away again at once.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # A closed descriptor leaves epoll by itself, but the loop would keep its entry.
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            os.close(fd)
            # Reads that wait see the negative number and return an empty result.
            for woken in self._waiting:
                _wake(woken)

    async def _ready(self, watch: Callable[..., Any], unwatch: Callable[[int], Any]) -> None:
        fd, woken = self._fd, self._loop.create_future()
        self._waiting.add(woken)
        watch(fd, _wake, woken)
        try:
            await woken
        finally:
            self._waiting.discard(woken)
            # After a close the number may already be another file's, whose watch must stay.
            if self._fd == fd:
                unwatch(fd)


def _wake(waiting: "asyncio.Future[None]") -> None:
    # `close` and the loop may both wake the same wait.
    if not waiting.done():
        waiting.set_result(None)
