"""Calls to the tool servers that run inside a sandbox, by HTTP or over a WebSocket."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sandboxes.calls import Execution, ToolCall
from sandboxes.errors import NotFreezableError
from sandboxes.host.server_calls import ServerCalls
from sandboxes.host.translate import execution
from sandboxes.ipc.codec import Envelope
from sandboxes.ipc.server_messages import ServerConnected
from sandboxes.linux.descriptors import close_all
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients import server_orders
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange
from sandboxes.tool_clients.server_orders import Spool, order
from sandboxes.tool_clients.websocket import Socket, carrier, is_message

ALONG_BYTES = 16 << 10
"""The largest request that is sent together with the request for a connection. The supervisor writes it before the
server reads, so it must fit into a new connection's socket buffer."""


class ToolCalls:
    """Forwards calls to the tool servers of one sandbox."""

    def __init__(
        self, servers: ServerCalls, spec: EnvironmentSpec, environment: Mapping[str, str], folder: Path
    ) -> None:
        """Prepare for a sandbox's calls. `environment` gives way to the spec's; long answers are stored in `folder`."""
        self._servers, self._spec, self._environment, self._folder = servers, spec, environment, folder
        self._hosted = spec.hosted
        self._sockets: dict[str, Socket] = {}

    def handles(self, call: ToolCall) -> bool:
        """Whether a call is for one of the servers."""
        return call.endpoint in self._hosted

    async def start(self) -> None:
        """Start the servers that belong to the root state. Raises ServerError if one of them did not get ready."""
        hosted = self._hosted.items()
        orders = [order(name, self._spec, self._environment) for name, server in hosted if server.start == "root"]
        if orders:
            await self._servers.start(orders)

    async def execute(self, call: ToolCall, listener: Listener | None) -> Execution:
        """Forward a call. The listener receives an HTTP answer while it comes."""
        return await (self._send_message(call) if is_message(call) else self._forward(call, listener))

    async def _forward(self, call: ToolCall, listener: Listener | None) -> Execution:
        server = self._hosted[call.endpoint]
        # Built first: a call that cannot be sent must not begin.
        head = server_orders.request(call, server.port)
        # A small request saves a round trip: the server works on it before the connection has come here.
        along = head + call.body if len(head) + len(call.body) <= ALONG_BYTES else b""
        connected = await self._servers.connect(order(call.endpoint, self._spec, self._environment), along)
        silence_s = server.timeout_s or self._spec.limits.timeout_s
        spool = Spool(call, listener, max_bytes=server.answer_bytes, folder=self._folder, rest_s=silence_s)
        try:
            async with self._servers.conversation(call.endpoint):
                connection = socket.socket(fileno=connected.fds[0])
                # `exchange` closes the connection in every case.
                await exchange(connection, head, call.body, spool, silence_s=silence_s, sent=bool(along))
                # Before the result is read: the supervisor compares states at this moment.
                done = await self._servers.finish(read=server_orders.reads(call))
                # A response of which only the digest is kept cannot be given to another client.
                ran = execution(done, spool.result())
                return replace(ran, shareable=ran.shareable and spool.whole and not server_orders.volatile(call))
        finally:
            spool.close()

    async def _send_message(self, call: ToolCall) -> Execution:
        server = self._hosted[call.endpoint]
        carried = carrier(call, order(call.endpoint, self._spec, self._environment))
        # The carrier is a process in the sandbox like any server, so a checkpoint holds the connection.
        connected = await self._servers.connect(carried)
        silence_s = server.timeout_s or self._spec.limits.timeout_s
        async with self._servers.conversation(call.endpoint):
            # Inside the block: a WebSocket that has ended is an error of the server.
            connection = self._socket(call, carried.name, connected, server.port, server.answer_bytes)
            if connected.message.fresh:
                await connection.shake_hands(call, silence_s=silence_s)
            messages = await connection.exchange(call, silence_s=silence_s)
            done = await self._servers.finish(read=server_orders.reads(call))
        ran = execution(done, messages.result())
        return replace(ran, shareable=ran.shareable and not server_orders.volatile(call))

    def _socket(
        self, call: ToolCall, name: str, connected: Envelope[ServerConnected], port: int, max_bytes: int
    ) -> Socket:
        fresh = connected.message.fresh
        known = self._sockets.get(name)
        # The known end has the protocol's machine and unread messages; the new descriptors lead to the same pipes.
        if known is not None and not fresh:
            close_all(connected.fds)
            return known
        # The carrier was restarted, so the old end leads nowhere.
        if known is not None:
            known.close()
        # A connection that is neither known nor fresh has come back with a checkpoint: its handshake is over.
        self._sockets[name] = Socket(connected.fds, call, port, max_bytes=max_bytes, opened=not fresh)
        # The client believes in a connection that the server has lost, so it has to be shown the end.
        if fresh and not call.arguments["first"]:
            raise MalformedResponseError("its WebSocket has ended")
        return self._sockets[name]

    def require_still(self) -> None:
        """Raise NotFreezableError if a WebSocket message came that no call returned: a frozen state would lose it."""
        if not all(connection.is_drained for connection in self._sockets.values()):
            raise NotFreezableError("a server has sent messages over its WebSocket that no call is waiting for")

    def close(self) -> None:
        """Close the WebSockets, when the sandbox is closed."""
        for connection in self._sockets.values():
            connection.close()
