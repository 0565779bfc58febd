"""The docker endpoint: HTTP requests, responses that are sent piece by piece, and connections that become streams."""

import re
from collections.abc import Coroutine, Mapping
from typing import Any

import orjson
import structlog
from typing_extensions import override

from proxy.compat.docker.api import DockerApi
from proxy.compat.docker.lifecycle import StreamedResponse
from proxy.compat.docker.responses import error_response
from proxy.compat.docker.stream import StreamConnection
from proxy.compat.endpoints import EndpointContext, StreamTransport
from proxy.dialects.base import Dialect, Local, Meaning, Request
from proxy.http.access import ALL, GRANT
from proxy.http.address import Address
from proxy.http.answer_cache import raw, response
from proxy.http.exchange import Exchange
from proxy.http.problems import failed_call
from proxy.refusals import Problem, RefusalError

_STREAM_PATHS = re.compile(rb"/docker(?:/v[0-9.]+)?/(?:exec/[^/]+/start|containers/[^/]+/attach)/?")
_COMMAND_LINES = (b"Docker-Client/", b"compose/")
"""How the user agents of Docker's command line and of its plugin for compose begin."""
_NAME = "docker"

log = structlog.get_logger()


def _shows_no_response(scope: Mapping[str, Any]) -> bool:
    """Return whether the client ignores error responses to upgrades: Docker sends errors of execs in the stream."""
    headers = {name: value for name, value in scope["headers"] if name in {b"user-agent", b"upgrade"}}
    return b"upgrade" in headers and headers.get(b"user-agent", b"").startswith(_COMMAND_LINES)


class _DockerErrors(Dialect):
    """Gives problems Docker's form. `DockerApi` parses the requests of this endpoint."""

    headers_matter = True

    @override
    def read(self, request: Request) -> Meaning:
        raise NotImplementedError

    @override
    def problem(self, problem: Problem, request: Request) -> Local:
        return error_response(problem.status, problem.detail)


_ERRORS = _DockerErrors()


class DockerEndpoint:
    """Serves the docker endpoint of all tasks."""

    path_part = b"/docker"

    def __init__(self, context: EndpointContext) -> None:
        self._api = DockerApi(context, context.answers)
        self._address_of, self._count = context.address_of, context.count
        self._max_streams = context.settings.max_requests
        self._open_streams = 0
        context.lifecycle.before_close.append(self._api.aclose)

    def owns(self, scope: Mapping[str, Any]) -> bool:
        """Return whether a request is for this endpoint."""
        try:
            return self._address_of(scope).endpoint == _NAME
        except RefusalError:
            return False

    def known(self, scope: Mapping[str, Any], body: bytes | bytearray) -> bytes | None:
        """Return the whole HTTP response to a request; None if it needs an await."""
        return self._api.known(
            scope["method"], self._address_of(scope), scope["query_string"], bytes(body), scope.get(GRANT, ALL)
        )

    async def serve(self, scope: Mapping[str, Any], address: Address, body: bytes, exchange: Exchange) -> None:
        """Answer an HTTP request. Raises RefusalError, which the exchange reports in Docker's form."""
        exchange.understood(_ERRORS, Request(scope["method"], "/", (), b""))
        answer = await self._api.answer(scope["method"], address, scope["query_string"], body, scope.get(GRANT, ALL))
        if isinstance(answer, StreamedResponse):
            await exchange.stream(answer.headers, answer.content)
        else:
            await exchange.local(answer)

    async def refuse(
        self,
        scope: Mapping[str, Any],
        address: Address,  # noqa: ARG002 - see `Endpoint.refuse`
        problem: Problem,
        exchange: Exchange,
    ) -> None:
        """Answer a request with a problem that was noticed before the request was read."""
        exchange.understood(_ERRORS, Request(scope["method"], "/", (), b""))
        await exchange.problem(problem)

    # -- connections that become streams -----------------------------------------------------------------------------

    def may_stream(self, scope: Mapping[str, Any]) -> bool:
        """Return whether the connection of a request may become a stream, given the request's head."""
        return scope["method"] == "POST" and _STREAM_PATHS.search(scope["raw_path"]) is not None

    def takes_connection(self, scope: Mapping[str, Any], body: bytes) -> bool:
        """Return whether the connection of a request becomes a stream, given the whole request."""
        try:
            detached = scope["raw_path"].endswith(b"/start") and bool(orjson.loads(body or b"{}").get("Detach"))
            return not detached and self.owns(scope)
        except (orjson.JSONDecodeError, AttributeError):
            # The body is invalid. As an ordinary request it gets an ordinary error.
            return False

    def open_stream(
        self, scope: Mapping[str, Any], body: bytes, transport: StreamTransport, *, upgrade: bool, rest: bytes
    ) -> tuple[StreamConnection, Coroutine[Any, Any, None] | None]:
        """Take a connection over; see `StreamingEndpoint.open_stream`."""
        # docker-py loses what arrives with the head of a stream; see `PADDED_HEAD_BYTES`.
        padded = any(
            name == b"user-agent" and value.startswith(b"docker-sdk-python") for name, value in scope["headers"]
        )
        connection = StreamConnection(
            transport.write, transport.drain, transport.hold, transport.close, upgrade=upgrade, padded=padded
        )
        if rest:
            connection.feed(rest)
        known = self._stream_known(scope, body, connection)
        return connection, None if known else self._stream(scope, body, connection)

    def _stream_known(self, scope: Mapping[str, Any], body: bytes, connection: StreamConnection) -> bool:
        try:
            return self._api.stream_known(self._address_of(scope), body, scope.get(GRANT, ALL), connection)
        except Exception as error:  # noqa: BLE001 - `stream` meets the same error again, and reports it
            log.debug("not answered at once", error=repr(error))
            return False

    async def _stream(self, scope: Mapping[str, Any], body: bytes, connection: StreamConnection) -> None:
        self._open_streams += 1
        try:
            self._require_free_stream()
            grant = scope.get(GRANT, ALL)
            await self._api.stream(self._address_of(scope), scope["query_string"], body, grant, connection)
        except Exception as error:  # noqa: BLE001 - a request ends here
            await self._report(scope, error, connection)
        finally:
            self._open_streams -= 1
            connection.close()

    def _require_free_stream(self) -> None:
        if self._open_streams > self._max_streams:
            raise RefusalError(
                429, "too-many-requests", f"The limit of {self._max_streams} requests (max_requests) is reached. Retry "
                "later, or raise it."
            )  # fmt: skip

    async def _report(self, scope: Mapping[str, Any], error: Exception, connection: StreamConnection) -> None:
        problem = failed_call(scope, error, self._count)
        address, grant = self._address_of(scope), scope.get(GRANT, ALL)
        if not connection.opened and _shows_no_response(scope) and self._api.fail_exec(address, grant):
            connection.open(tty=connection.tty)
        if connection.opened:
            await connection.send_error(f"forkpoint: {problem.detail}")
            return
        local = error_response(problem.status, problem.detail)
        # The connection has left HTTP's parser, so it cannot serve another request.
        headers = [*raw(local.headers), (b"content-length", b"%d" % len(local.body)), (b"connection", b"close")]
        connection.refuse(response(local.status, headers, local.body))
