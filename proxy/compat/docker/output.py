"""The output of processes on its way to Docker's clients.

A process may have several clients (`attach`, `logs --follow`). `OutputListener`, the listener of its call, has one
`OutputSink` for each of them, and keeps the output for clients that connect later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sandboxes.listener import Headers
from sandboxes.process_output import ERR, Frames, ending, frame, frames
from sandboxes.task_owner import start


class OutputSink:
    """One client's end of a process's output."""

    def __init__(
        self, send: Callable[[bytes], Awaitable[None]], streams: frozenset[int], *, tty: bool, has_output: bool = False
    ) -> None:
        """Create a sink for stdout (1) and stderr (2); `has_output`: the client has had the earlier output."""
        self._send, self._streams, self._tty, self.has_output = send, streams, tty, has_output

    async def put(self, kind: int, data: bytes) -> None:
        """Send a piece of one stream."""
        self.has_output = True
        if kind in self._streams:
            await self._send(data if self._tty else frame(kind, data))

    async def put_result(self, body: bytes) -> None:
        """Send the whole output of a recorded result."""
        await self._send(client_output(body, self._streams, tty=self._tty))


class OutputListener:
    """The listener of a process's call (see `Detachable`): distributes the output to the attached clients."""

    def __init__(
        self,
        sinks: list[OutputSink],
        started: Callable[[], None] | None = None,
        disconnected: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Create a listener; it detaches the process once `disconnected`, if given, returns: its client is gone."""
        self.sinks, self._started, self._disconnected = sinks, started, disconnected
        self._detach = asyncio.Event()
        self.output = Frames()  # The output so far, for clients that attach later.

    async def head(self, _status: int, _headers: Headers) -> None:
        """Note that the process runs."""
        if self._started is not None:
            self._started()

    async def data(self, chunk: bytes) -> None:
        """Send a piece of output to every sink."""
        for kind, data in frames(chunk):
            # Copied, because a client may attach while a slow one is awaited.
            self.output.add(kind, data)
            for sink in list(self.sinks):
                await sink.put(kind, data)

    @property
    def has_output(self) -> bool:
        """Whether the process has produced output."""
        return self.output.size > 0

    async def detached(self) -> None:
        """Return once the client has disconnected or `detach` was called."""
        # Two events detach: a service's request, and the loss of the client that waits.
        await first_of(self._detach.wait(), *([] if self._disconnected is None else [self._disconnected()]))

    def detach(self) -> None:
        """Let the process continue in the background, so that the rollout's next call does not wait for it."""
        self._detach.set()


def client_output(body: bytes, streams: frozenset[int], *, tty: bool) -> bytes:
    """Return a recorded result as a client's stream of stdout (1) and stderr (2): raw on a terminal, else in frames."""
    # The last frame has the exit code. It is ours, and no client may see it.
    output = b"".join(data if tty else frame(kind, data) for kind, data in frames(body) if kind in streams)
    if not ending(body).timed_out:
        return output
    note = b"\n[forkpoint: killed: it ran for longer than the task's limits.timeout_s]\n"
    return output + (note if tty else frame(ERR, note))


async def first_of(*events: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of these events, and cancel the others."""
    waiting = {start(event) for event in events}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
