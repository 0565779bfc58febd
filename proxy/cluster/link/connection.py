"""What both ends of a link have in common: a greeting that proves the secret, then frames, and the end of silence."""

import asyncio
from abc import ABC, abstractmethod
from typing import cast

import structlog
from typing_extensions import override

from proxy.cluster.link.channels import CHANNEL_KINDS, Channels
from proxy.cluster.link.frames import Frame, FrameKind, FrameReader, FrameWriter, LinkError

log = structlog.get_logger()

PING_S = 0.5
"""Interval of the pings on a link, in seconds."""
SILENT_S = 2.0
"""Seconds without a byte after which a link is dead. Below a lease, so that a new owner gets the questions in time.

Halved, a busy machine loses its links. Doubled, calls wait longer for a machine that has gone.
"""
HANDSHAKE_S = 5.0
"""Seconds that a connection may take to prove the secret. Until then it can make this member hold 100 bytes."""


class LinkConnection(asyncio.Protocol, ABC):
    """One end of a link."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._greeting = bytearray()
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._channels = Channels(self.send, self.drain)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Until the secret is proven. `_established` replaces this timer by the one of `_watch`.
        self._timer = self._loop.call_later(HANDSHAKE_S, self.abort)

    @override
    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            if self._reader is None:
                # Frames may follow the greeting in the same packet: `_greet` returns them.
                self._greeting += data
                data = self._greet()
            if self._reader is None:
                return
            for frame in self._reader.feed(data):
                # Frames of open channels first: `_got` knows questions and answers only.
                if frame.kind not in CHANNEL_KINDS or not self._channels.got(frame):
                    self._got(frame)
        except LinkError as error:
            log.warning("a link was closed", reason=str(error))
            self.abort()

    @override
    def pause_writing(self) -> None:
        self._writable.clear()

    @override
    def resume_writing(self) -> None:
        self._writable.set()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        # A writer may wait in `drain`, and nothing will drain a lost connection.
        self._writable.set()
        self._channels.lose()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_open(self) -> bool:
        """Whether the secret was proven and the connection is up."""
        return self._reader is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def send(self, kind: FrameKind, stream: int, content: bytes) -> None:
        """Send a frame; one of a closed link is lost. uvloop sends those of one turn of the event loop in one write."""
        assert self._writer is not None
        if not self._transport.is_closing():
            self._transport.write(self._writer.write(kind, stream, content))

    async def drain(self) -> None:
        """Wait until the peer has read most of what was sent."""
        await self._writable.wait()

    def _established(self, writer: bytes, reader: bytes) -> None:
        self._writer, self._reader = FrameWriter(writer), FrameReader(reader)
        assert self._timer is not None
        self._timer.cancel()
        self._watch()

    def _watch(self) -> None:
        """Close a link that is silent: its opener sends pings."""
        if self._loop.time() - self._heard_at > SILENT_S:
            self.abort()
            return
        self._timer = self._loop.call_later(PING_S, self._watch)

    @abstractmethod
    def _greet(self) -> bytes:
        """Read what has come of the peer's greeting; return what follows it."""

    @abstractmethod
    def _got(self, frame: Frame) -> None:
        """Take a frame of the peer."""
