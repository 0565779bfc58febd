"""A transport of httpx that sends each request in one packet, as many agents' clients do.

httpx sends the body of a request after its head, in a packet of its own. The proxy answers a hit without its
application only if the whole request is there at once, so a benchmark of answers needs clients of both kinds.
"""

import socket
import threading
from http.client import HTTPException, HTTPResponse

import httpx
from typing_extensions import override

Address = tuple[str, int]


class OnePacket(httpx.BaseTransport):
    """Sends HTTP/1.1 requests to plain `http` URLs. Each thread has connections of its own, which stay open."""

    def __init__(self, timeout_s: float) -> None:
        """Give up a request without an answer after some seconds."""
        self._timeout_s = timeout_s
        self._connections: dict[tuple[int, Address], socket.socket] = {}

    @override
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        address = request.url.host, request.url.port or 80
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b" % header for header in request.headers.raw]
        try:
            connection = self._connection(address)
            connection.sendall(b"\r\n".join([*lines, b"", request.read()]))
            response = HTTPResponse(connection, method=request.method)
            response.begin()
            content = response.read()
        except (OSError, HTTPException) as error:
            self._close(address)
            raise httpx.ReadError(str(error), request=request) from error
        if response.will_close:
            self._close(address)
        return httpx.Response(response.status, headers=response.getheaders(), content=content, request=request)

    @override
    def close(self) -> None:
        """Close the connections of all threads, none of which may use this transport any more."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _connection(self, address: Address) -> socket.socket:
        name = threading.get_ident(), address
        if name not in self._connections:
            self._connections[name] = socket.create_connection(address, self._timeout_s)
        return self._connections[name]

    def _close(self, address: Address) -> None:
        connection = self._connections.pop((threading.get_ident(), address), None)
        if connection is not None:
            connection.close()
