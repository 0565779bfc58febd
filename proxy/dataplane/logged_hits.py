"""Connections to a member of a cluster: the answer to a known call is sent when its step is in the log.

`LoggedHits` has one state more than `HitFirst`:

LOGGED    The step of the request is on its way to the log. Bytes that follow wait, and the client may send no more.
            1. The step is in the log: the response is one write. -> READING, and the bytes are read.
            2. The task has another owner: uvicorn gets the request, which is the same call. -> SERVED
"""

from functools import partial
from typing import Any

from typing_extensions import override

from proxy.dataplane.hit_protocol import HitFirst, _State


class LoggedHits(HitFirst):
    """One connection of an agent, or of a member that passes calls on."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        hits = self.data_plane.hits
        assert hits is not None
        self._hits, self.known = hits, hits.of(self._app_state)
        self._call: object = None
        self._behind = b""  # What came after the request whose step is on its way.
        self._closes = False  # Whether the connection is closed after the answer.

    @override
    def data_received(self, data: bytes) -> None:
        if self._state is not _State.LOGGED:
            super().data_received(data)
            return
        if not self._behind:
            self._transport.pause_reading()
        self._behind += data

    @override
    def shutdown(self) -> None:
        self._closes = self._state is _State.LOGGED
        super().shutdown()

    @property
    @override
    def is_idle(self) -> bool:
        return self._state is _State.LOGGED or super().is_idle

    @override
    def expire(self) -> bool:
        return self._state is _State.LOGGED or super().expire()

    @override
    def _write(self, response: bytes) -> None:
        self._state = _State.LOGGED
        self._call = self._hits.log(partial(self._logged, response))

    def _logged(self, response: bytes, is_in_log: bool) -> None:
        """Send the answer if its step is in the log; else make the call again, at the next owner."""
        self._state, call, self._call = _State.READING, self._call, None
        if self._transport.is_closing():
            if not is_in_log:
                self.release(call)
            return
        if is_in_log:
            super()._write(response)
        else:
            self._serve_request(call)
        if self._closes:
            # In SERVED, the server has asked uvicorn before it had the request.
            self.shutdown()
            self._uvicorn.shutdown()
        behind, self._behind = self._behind, b""
        if behind:
            self._transport.resume_reading()
            self.data_received(behind)
