"""A call to a tool server, as its supervisor sees it: the server is made ready, a conversation runs, the call ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast

from sandboxes.errors import ServerError
from sandboxes.host.guest import Guest
from sandboxes.host.guest_link import GRACE_S
from sandboxes.ipc.codec import Envelope
from sandboxes.ipc.messages import CallDone, ServerOutcome
from sandboxes.ipc.server_messages import (
    FinishServerCall,
    ReconnectServer,
    ServerConnected,
    ServerFailed,
    ServerOrder,
    StartServers,
    UseServer,
)
from sandboxes.tool_clients.http1 import MalformedResponseError

ConnectedT = TypeVar("ConnectedT")


class ServerCalls:
    """Begins and ends calls to a sandbox's tool servers. A `ServerError` means that the sandbox is dead."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    async def start(self, orders: Sequence[ServerOrder]) -> None:
        """Start servers as part of the root state. Raises ServerError if one of them did not get ready."""
        # The sum, because they start one after the other.
        within_s = sum(order.ready_s for order in orders)
        self._require_server(await self._guest.link.call(StartServers(list(orders)), b"", within_s))

    async def connect(self, order: ServerOrder, first: bytes = b"") -> Envelope[ServerConnected]:
        """Begin a call: return descriptors that lead to the server, which is started if it does not run."""
        # The supervisor writes `first` to the server at once.

        # `ask` of the sandbox: it waits for what the last call left to do.
        return self._require_server(await self._guest.ask(UseServer(order), first, order.ready_s))

    async def reconnect(self, ready_s: float) -> int:
        """Return another connection to the server of the current call; `ServerError` if it does not run any more."""
        link = self._guest.link
        try:
            # Through the link: the call has begun already, so there is nothing to settle.
            connected = self._require_server(await link.ask(ReconnectServer(), within_s=ready_s + GRACE_S))
        except asyncio.CancelledError:
            # The answer that comes now would be taken for that to the next request.
            link.die("its call was cancelled")
            raise
        return connected.fds[0]

    async def finish(self, *, read: bool, note: str | None = None) -> Envelope[CallDone]:
        """End a call whose answer has come; see `FinishServerCall`."""
        # The end of a call compares the state with the one before, so it comes after the whole response.
        return self._guest.conclude(await self._guest.link.ask(FinishServerCall(read, note=note)))

    @asynccontextmanager
    async def conversation(self, name: str) -> AsyncIterator[None]:
        """Turn what goes wrong while a server is talked to into a ServerError that quotes the server's log."""
        try:
            yield
        except (MalformedResponseError, OSError, TimeoutError) as error:
            # The server's log is fetched from the supervisor, and then the sandbox ends.
            raise await self._failure(name, error) from error
        except BaseException as error:
            # A sandbox in the middle of a call takes no other one.
            self._guest.link.die(f"its call was cut off: {type(error).__name__}")
            raise

    async def _failure(self, name: str, error: Exception) -> ServerError:
        silent = isinstance(error, TimeoutError)
        # Ends the call at the supervisor and brings the log along; it must come before the kill.
        done = await self._guest.link.ask(FinishServerCall(read=False, log=True))
        outcome = done.message.outcome
        log = outcome.log if isinstance(outcome, ServerOutcome) else ""
        self._guest.link.die(f"its server {name!r} failed")
        what = "says nothing for too long" if silent else f"failed: {error}"
        return ServerError(f"server {name!r} {what}. It printed: {log}", silent=silent)

    def _require_server(self, answer: Envelope[ConnectedT | ServerFailed]) -> Envelope[ConnectedT]:
        message = answer.message
        if isinstance(message, ServerFailed):
            # What the server did before it failed is not known.
            self._guest.link.die(message.detail)
            raise ServerError(message.detail, silent=message.kind == "silent")
        return cast("Envelope[ConnectedT]", answer)
