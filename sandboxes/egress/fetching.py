"""Responses to plain requests: from the recording, or from the host, which then becomes the recording.

A response is complete here before a program receives its first byte. So a program never sees a half of one, and what it
has seen is what is recorded. Programs that send the same request at the same time wait for one response.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import BinaryIO

from sandboxes.calls import EgressOutcome
from sandboxes.egress.dialing import Dialer, FailedError
from sandboxes.egress.fair_slots import FairSlots, Requester
from sandboxes.egress.recordings import MAX_BODY_BYTES, MAX_HEADERS, REFRAMED, RecordedResponse, Recordings, is_recorded
from sandboxes.egress.targets import RefusedError, Target
from sandboxes.http_message import InvalidRequestError, end_to_end, request_head
from sandboxes.listener import Headers
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange

_SILENCE_S = 30.0
"""Longest time without a byte of a host. The value is an estimate."""
_RESPONSE_S = 300.0
"""Longest time of a whole response: the largest one at half a megabyte a second."""
_AT_ONCE = 32
"""Responses that are received at once: bounds the disk that drafts take to 32 times the largest response. A sandbox
gets 11 of them; package managers open some ten connections."""


class HostFetcher:
    """Answers plain requests."""

    def __init__(self, dialer: Dialer, recordings: Recordings, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._dialer, self._recordings, self._max_body_bytes = dialer, recordings, max_body_bytes
        self._room = FairSlots(_AT_ONCE)
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    async def fetch(
        self, requester: Requester, method: str, target: Target, headers: Headers
    ) -> tuple[RecordedResponse, EgressOutcome]:
        """Return a response to a request that is allowed, and whether it was recorded now or before, or is not."""
        try:
            head = request_head(method, target.path, headers, target.authority, 0)
        except InvalidRequestError as error:
            raise RefusedError(400, str(error)) from None
        key = _key(requester.scope, method, target, headers)
        known = await asyncio.to_thread(self._recordings.load, key)
        if known is not None:
            return known, "repeated"
        # The slot comes before the turn: a sandbox that waits for a slot must not keep others from the same request.
        await self._room.take(requester)
        try:
            async with self._turn(key):
                known = await asyncio.to_thread(self._recordings.load, key)
                return (known, "repeated") if known is not None else await self._receive(requester, key, head, target)
        finally:
            self._room.give_back(requester)

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        """Hold the only turn for a request: a second response, with other bytes, must not come beside the first."""
        lock, waiting = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            waiting = self._turns[key][1] - 1
            if waiting:
                self._turns[key] = lock, waiting
            else:
                del self._turns[key]

    async def _receive(
        self, requester: Requester, key: str, head: bytes, target: Target
    ) -> tuple[RecordedResponse, EgressOutcome]:
        draft = self._recordings.draft()
        try:
            receiver = _Receiver(draft, self._max_body_bytes)
            try:
                async with asyncio.timeout(_RESPONSE_S):
                    connection = await self._dialer.dial(requester, target.host, target.port)
                    await exchange(connection, head, b"", receiver, silence_s=_SILENCE_S)
            except MalformedResponseError as error:
                raise FailedError(f"{target.host}: {error}") from None
            except TimeoutError:
                raise FailedError(f"{target.host} sent its response too slowly") from None
            except OSError as error:
                raise FailedError(f"{target.host}: the connection broke: {error}") from None
            length = draft.tell()
            kept = is_recorded(receiver.status)
            if kept:
                await asyncio.to_thread(self._recordings.keep, key, draft, receiver.status, receiver.headers)
            draft.seek(0)
        except BaseException:
            self._recordings.drop(draft)
            draft.close()
            raise
        self._recordings.drop(draft)
        return RecordedResponse(receiver.status, receiver.headers, length, draft), "recorded" if kept else "live"


class _Receiver:
    def __init__(self, draft: BinaryIO, max_bytes: int) -> None:
        self.status = 0  # 0 until it is there.
        self.headers: Headers = ()  # End-to-end headers, without those that frame the response.
        self._draft, self._room = draft, max_bytes

    async def head(self, status: int, headers: Headers) -> None:
        if len(headers) > MAX_HEADERS:
            raise FailedError(f"the response has more than {MAX_HEADERS} headers")
        self.status, self.headers = status, end_to_end(headers, without=REFRAMED)

    async def data(self, chunk: bytes) -> None:
        self._room -= len(chunk)
        if self._room < 0:
            raise FailedError("the response is too large to be recorded")
        self._draft.write(chunk)


def _key(scope: str, method: str, target: Target, headers: Iterable[tuple[str, str]]) -> str:
    parts = [scope, method, target.url, list(headers)]
    # The scope comes first, so that the recordings of one environment are found.
    return f"{scope}-{hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).hexdigest()}"
