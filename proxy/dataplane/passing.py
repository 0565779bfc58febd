"""Requests that another process may answer at once: what a connection and the one that passes them on promise."""

from typing import Protocol

from proxy.http.asgi import Scope

PASSED = "forkpoint.passed"
"""Member of a scope with the `PassedRequest` that it continues, if another process has the request already."""


class WaitingConnection(Protocol):
    """A connection whose only request another process has. It gets one of two calls, unless it is lost before."""

    def answered(self, response: bytes) -> None:
        """Write the whole response."""
        ...

    def declined(self) -> None:
        """Let the application have the request: it has no answer at once. Its scope gets the passed request."""
        ...


class PassedRequest(Protocol):
    """A request that another process has."""

    def lose(self) -> None:
        """Note that the client has hung up."""
        ...

    def release(self) -> None:
        """Note that the application has returned, or never will be called. Idempotent."""
        ...


class Passing(Protocol):
    """Passes requests on."""

    def begin(
        self, scope: Scope, request: bytes, body: bytes | bytearray, connection: WaitingConnection
    ) -> PassedRequest | None:
        """Pass a request on, or return None: then it stays here.

        Args:
            scope: The scope that `DataPlane.known` had and did not answer.
            request: The bytes of the whole request.
            body: Its body.
            connection: Gets the response, after this call has returned.
        """
        ...
