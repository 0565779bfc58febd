"""MCP: JSON-RPC with a tool server, one request at a time, over either transport.

Between a request and its response three kinds of messages may arrive, numbered in `McpConversation._receive`: the
response, notifications, and reverse requests. After a cancellation the server must answer within `CANCEL_S`, because a
state with a request half done cannot be frozen. Requests carry a fixed id and progress token, so a server sees the same
bytes whichever rollout asks; the official SDK numbers its requests, which is why it is not used here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson

from sandboxes.listener import Cancellable, Listener
from sandboxes.task_owner import start
from sandboxes.tool_clients.http1 import MalformedResponseError
from sandboxes.tool_clients.json_text import exceeds_64_bits, parse_json

Message = dict[str, Any]
"""A JSON-RPC message."""
Receive = Callable[[Message], Awaitable[bool]]
"""Takes the next message of a server; returns True if it is the response."""

VERSION, MODERN = "2025-11-25", "2026-07-28"
"""The two revisions of the protocol: one with an `initialize` handshake and sessions, one without both."""
ID = 1
"""The id of every request. Only one is under way, and the id must not tell a server what came before."""
PAGED = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
"""Methods whose result is a list in pages, with the name of the list."""
MAX_PAGES = 1000
"""Most pages of one list. A server that lists without end is stopped there."""
PROGRESS_TOKEN = "forkpoint"  # noqa: S105 - it names a request
"""The progress token of every request: progress is always requested, so that the record holds it for later clients."""
CANCEL_S = 5.0
"""How long a server may take to answer after a request to cancel. Some never answer then."""
HELLO: Message = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "forkpoint", "version": "1"}}
"""The parameters of `initialize`."""
_SHAPES: dict[str, type] = {"method": str, "params": dict, "result": dict, "error": dict}
"""What the members of a message are, if they are there."""
_NOTIFICATIONS = 100_000
"""Most notifications before a response. Each takes half a kilobyte of memory, however short it is."""
_REFUSALS = {
    "sampling/createMessage": "Sampling not supported",
    "elicitation/create": "Elicitation not supported",
    "roots/list": "List roots not supported",
}
"""Error messages by reverse request, as the official SDK words them for a client without the capability."""


class SessionLostError(MalformedResponseError):
    """The server does not know the session any more, and has not looked at the request."""


@dataclass(slots=True)
class McpResponse:
    """What a server sent for one request."""

    payload: Message = field(default_factory=dict)  # The member `result` or `error` of the JSON-RPC response.
    # The ones before the response, each with `method` and `params`.
    notifications: list[Message] = field(default_factory=list)
    # The server has sent requests to its client (sampling, elicitation); the payload may depend on it.
    made_requests: bool = False
    cancelled: bool = False  # The client cancelled the request.
    pages: int = 1  # How many pages of a list the payload holds.

    def with_page(self, page: "McpResponse") -> "McpResponse":
        """Return this list with its next page appended, or the next page alone if it is an error."""
        if "result" not in page.payload:
            # An error in the middle of a list says that the whole could not be read, so no part of it is shown.
            return page
        before, more = self.payload["result"], page.payload["result"]
        # Only lists are kept, so `nextCursor` goes: the client gets one page that has no next one.
        result = {name: [*value, *_listed(more, name)] for name, value in before.items() if isinstance(value, list)}
        return McpResponse({"result": result}, self.notifications + page.notifications, pages=self.pages + 1)

    @property
    def shareable(self) -> bool:
        """Whether other rollouts may get the same response."""
        return not (self.made_requests or self.cancelled)


class McpTransport(Protocol):
    """Carries messages to a server and back."""

    @property
    def revisions(self) -> tuple[str, ...]:
        """The revisions that exist on this transport, the preferred one first."""
        ...

    @property
    def note(self) -> str:
        """What the next conversation with the same process must know; it is frozen with the process."""
        ...

    def begin(self, revision: str) -> None:
        """Speak this revision from now on, in a new session."""
        ...

    async def exchange(self, request: Message, receive: Receive, silence_s: float) -> None:
        """Send a request and pass on the server's messages until `receive` returns True; errors as of `request`."""
        ...

    async def send(self, message: Message, silence_s: float) -> None:
        """Send a message that has no response. Raises as `exchange` does."""
        ...

    async def cancel(self, silence_s: float) -> None:
        """Tell the server that the request under way is cancelled. Raises as `exchange` does."""
        ...

    def close(self) -> None:
        """Close what this end holds. The server goes on."""
        ...


class McpConversation:
    """The client's end of an MCP session. One request runs at a time."""

    def __init__(self, transport: McpTransport) -> None:
        self._transport = transport

    @property
    def note(self) -> str:
        """What the next conversation with the same process must know."""
        return self._transport.note

    def close(self) -> None:
        """Close this end of the transport."""
        self._transport.close()

    async def initialize(self, *, silence_s: float) -> None:
        """Make the handshake, once right after a process's start; it finds the server's revision of the protocol."""
        self._transport.begin(VERSION)
        response = await self.request("initialize", HELLO, silence_s=silence_s)
        if "result" in response.payload:
            # Servers send no requests of their own before this notification (MCP, lifecycle).
            await self._transport.send({"jsonrpc": "2.0", "method": "notifications/initialized"}, silence_s)
            return
        # A server that refuses `initialize` may speak the newer revision, which has no handshake.
        if MODERN in self._transport.revisions:
            self._transport.begin(MODERN)
            if "result" in (await self.request("server/discover", {}, silence_s=silence_s)).payload:
                return
        raise MalformedResponseError(f"it refuses to be initialised: {response.payload.get('error')}")

    async def request(
        self, method: str, params: Message, *, silence_s: float, listener: Listener | None = None
    ) -> McpResponse:
        """Send a request and collect everything up to its response.

        The listener gets notifications while they arrive; a `Cancellable` one can cancel the request. Raises
        MalformedResponseError if the server breaks the protocol or sends too much, OSError if it closed the connection,
        and TimeoutError if it was silent for `silence_s`, or for `CANCEL_S` after the cancellation.
        """
        response = McpResponse()
        request = {"jsonrpc": "2.0", "id": ID, "method": method, "params": params}
        # Bound here, so that a message is added to this response even if it arrives on the session's own stream.
        receive = partial(self._receive, response, listener, silence_s)
        # A task, because the client may cancel while the server is silent.
        receiving = start(self._transport.exchange(request, receive, silence_s))
        cancelling = start(listener.cancelled()) if isinstance(listener, Cancellable) else None
        tasks = [receiving] if cancelling is None else [receiving, cancelling]
        try:
            # `wait` cancels nothing, so the exchange goes on and may still bring its response.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Set before the message goes out: the response that follows may already be the server's reaction.
                response.cancelled = True
                await self._transport.cancel(silence_s)
                async with asyncio.timeout(CANCEL_S):
                    await receiving
            # Raises what the exchange raised; `wait` does not.
            await receiving
        finally:
            # Both end here in every case: a listener that is never cancelled would leave its task waiting for ever.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return response

    async def _receive(
        self, response: McpResponse, listener: Listener | None, silence_s: float, message: Message
    ) -> bool:
        # Null stands for a member that is not there.
        message = {name: value for name, value in message.items() if value is not None}
        for name, shape in _SHAPES.items():
            if not isinstance(message.get(name, shape()), shape):
                raise MalformedResponseError(f"its message has a {name} that is {type(message[name]).__name__}")
        # 1. The response, which ends the exchange. Only one request is under way, so every response is to it.
        if "method" not in message:
            response.payload = _payload(message)
            return True
        # 2. A reverse request (to sample a model, to ask the user, to list roots). No client can answer it, because an
        # answer from the tree has no client. A result that may depend on the refusal is not shared.
        if "id" in message:
            # A ping asks for nothing that could differ from client to client.
            response.made_requests = response.made_requests or message["method"] != "ping"
            await self._transport.send(_reply(message), silence_s)
            return False
        notification = {"method": message["method"], "params": message.get("params", {})}
        # 3. A notification (progress, log lines), part of the recorded result. Recorded first: a client that is slow to
        # listen must not lose what later clients are shown.
        response.notifications.append(notification)
        if len(response.notifications) > _NOTIFICATIONS:
            raise MalformedResponseError(f"it sends more than {_NOTIFICATIONS} notifications for one request")
        if listener is not None:
            await listener.data(orjson.dumps(notification))
        return False


def require_list(method: str, payload: Message) -> None:
    """Raise MalformedResponseError if the list of a `PAGED` method is none, or one of tools without names (pure)."""
    kind = PAGED[method]
    entries = payload.get("result", {kind: []}).get(kind, None if kind == "tools" else [])
    if not isinstance(entries, list):
        raise MalformedResponseError(f"its result of {method} has no list {kind!r}")
    if kind == "tools" and not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in entries):
        raise MalformedResponseError(f"its result of {method} has tools without names")


def _listed(result: Message, name: str) -> list[Any]:
    value = result.get(name)
    return value if isinstance(value, list) else []


def _payload(response: Message) -> Message:
    """Return the member `result` or `error` of a response. Raises MalformedResponseError if it has neither."""
    if "error" in response and isinstance(response["error"].get("code"), int):
        return {"error": response["error"]}
    if "result" not in response:
        raise MalformedResponseError("its response has no result, and no error with a code")
    return {"result": response["result"]}


def cancellation() -> Message:
    """Return the notification that cancels the request under way."""
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ID}}


def parsed(data: bytes) -> Any:
    """Return a server's message. Raises orjson.JSONDecodeError; MalformedResponseError for a number it would lose."""
    if exceeds_64_bits(data):
        raise MalformedResponseError("it sends an integer beyond 64 bits, which cannot be passed on as it is")
    return parse_json(data)


def _reply(request: Message) -> Message:
    """Return the reply to a reverse request: a ping is answered, everything else refused."""
    method = request["method"]
    refusal = {"code": -32600, "message": _REFUSALS.get(method, "Not supported")}
    return {"jsonrpc": "2.0", "id": request["id"], **({"result": {}} if method == "ping" else {"error": refusal})}
