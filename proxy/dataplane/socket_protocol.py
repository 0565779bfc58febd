"""WebSocket connections, as uvicorn serves them, with bounds on what a client may make this side hold or do.

uvicorn bounds neither the pieces of one message, nor control frames, nor answers to pings that the client does not
read.
"""

from typing import Any

from typing_extensions import override
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_MAX_PIECES = 10_000
"""Most frames of one message. Each costs some hundred bytes, so a million of one byte would take 100 MB."""
_MAX_CONTROL_FRAMES, _CONTROL_WINDOW_S = 1_000, 10.0
"""Most pings and pongs in this many seconds; clients send one in some seconds."""


class BoundedSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket connection."""

    _control_frames = 0
    _control_since_s = 0.0

    @override
    def handle_cont(self, event: object) -> None:
        if len(self.frames) >= _MAX_PIECES:
            self._refuse(1009, "the message has too many frames")
            return
        super().handle_cont(event)  # type: ignore[arg-type]

    @override
    def handle_ping(self) -> None:
        if self._may_control():
            super().handle_ping()

    @override
    def handle_pong(self, event: object) -> None:
        if self._may_control():
            super().handle_pong(event)  # type: ignore[arg-type]

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        # A client that does not read gets no more answers, and so may ask no more.
        self.transport.pause_reading()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        # uvicorn itself stops reading while the application has a message.
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    @override
    async def receive(self) -> Any:
        message = await super().receive()
        # uvicorn has just gone on reading, if it had stopped for this message.
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    def _may_control(self) -> bool:
        """Count a control frame; return whether it may be handled."""
        now_s = self.loop.time()
        # Counted in windows of fixed length, which needs two numbers for each connection.
        if now_s - self._control_since_s > _CONTROL_WINDOW_S:
            self._control_since_s, self._control_frames = now_s, 0
        self._control_frames += 1
        if self._control_frames <= _MAX_CONTROL_FRAMES:
            return True
        self._refuse(1008, "too many control frames")
        return False

    def _refuse(self, code: int, reason: str) -> None:
        """Close the connection with a code (RFC 6455, 7.4.1)."""
        # A second close frame would be an error of this side.
        if self.close_sent or self.transport.is_closing():
            return
        self.close_sent, self.frames = True, []
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()
