"""The ASGI types that all endpoints share (ASGI 3.0 specification)."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
"""What the server knows of a connection: type, path, headers, client."""
AsgiMessage = MutableMapping[str, Any]
"""One event between server and application; `type` says which."""
Receive = Callable[[], Awaitable[AsgiMessage]]
"""Returns the client's next event."""
Send = Callable[[AsgiMessage], Awaitable[None]]
"""Sends an event to the client."""
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An application, or a middleware around one."""
ReceivedHeaders = Iterable[tuple[bytes, bytes]]
"""Header names in lower case and their values, both latin-1, in the order of the request."""
