"""Calls to tool servers: the order that starts a server, the request of a call, and the spool of its response."""

import hashlib
import math
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import orjson

from sandboxes.calls import ToolCall, ToolResult, content_type
from sandboxes.errors import SandboxError, ServerError
from sandboxes.http_message import InvalidRequestError, of_tool_server, request_head
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.listener import Headers, Leaving, Listener
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients import harness
from sandboxes.tool_clients.http1 import MalformedResponseError

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_MEMORY_BYTES = 1 << 20
"""Largest response that a spool keeps in memory; longer ones go to a file."""


def order(name: str, spec: EnvironmentSpec, environment: Mapping[str, str]) -> ServerOrder:
    """Return what starts and reaches a tool server of the spec (pure); its variables override `environment`."""
    server = spec.hosted[name]
    return ServerOrder(
        name=name,
        command=server.command,
        port=server.port,
        # The server's own variables come last and win.
        environment={**environment, **spec.env, **server.env},
        workdir=spec.directory,
        ready=server.ready,
        ready_s=server.ready_s,
    )


def mcp_order(name: str, spec: EnvironmentSpec, environment: Mapping[str, str]) -> ServerOrder:
    """Return the same for an MCP server of the spec; over stdio it has no port (pure)."""
    server = spec.mcp_servers[name]
    if server.command is None:
        # An MCP server over HTTP is a tool server of the spec that listens on its port; both share one process.
        return order(next(other for other in spec.hosted if spec.hosted[other].port == server.port), spec, environment)
    return ServerOrder(
        name=f"mcp {name}",
        # `exec`: the shell becomes the server, so signals and the pipes reach the server itself.
        command=f"exec {shlex.join([server.command, *server.args])}",
        port=server.port,
        environment={**environment, **spec.env, **server.env},
        workdir=server.cwd or spec.directory,
        ready="tcp",
        ready_s=server.ready_s,
    )


def harness_order(spec: EnvironmentSpec, environment: Mapping[str, str]) -> ServerOrder:
    """Return the same for the relay of the spec's harness, which talks over stdin and stdout (pure)."""
    assert spec.harness is not None
    command, variables = harness.relay_command(spec.harness), {**environment, **spec.env}
    return ServerOrder("harness", command, None, variables, spec.directory, ready="tcp", ready_s=60.0)


def request(call: ToolCall, port: int) -> bytes:
    """Return the head of the request that a call makes to the server on a port (pure)."""
    arguments = call.arguments
    # JSON has no tuples: headers come as lists of two.
    headers = ((name, value) for name, value in arguments["headers"])
    try:
        return request_head(arguments["method"], arguments["target"], headers, f"127.0.0.1:{port}", len(call.body))
    except InvalidRequestError as error:
        raise SandboxError(f"the call cannot be sent to its server: {error}") from error


def reads(call: ToolCall) -> bool:
    """Return whether a call leaves the server's memory unchanged, according to a rule or to its method (pure)."""
    # A rule of the spec knows more than the method: some servers change state on GET.
    effect = call.arguments.get("effect")
    return effect == "read" or (effect is None and call.arguments["method"] in _READS)


def volatile(call: ToolCall) -> bool:
    """Return whether a rule says that the response is valid for this rollout and moment only (pure)."""
    return call.arguments.get("cache") == "never"


class Spool(Listener):
    """Keeps the response to a call while it arrives, and passes it on, in constant memory: large ones go to a file."""

    def __init__(
        self, call: ToolCall, listener: Listener | None, *, max_bytes: int, folder: Path, rest_s: float
    ) -> None:
        """Begin the spool of the response to a call, of which at most `max_bytes` of body are kept.

        `rest_s` is the longest time until the response ends once its client has left.
        """
        # The file in `folder` has no name and so leaves nothing behind after a crash.
        self._listener, self._max_bytes, self._rest_s, self._left_at = listener, max_bytes, rest_s, math.inf
        # Without a name on disk, the file goes with its last descriptor, a killed process included.
        self._file = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, dir=str(folder))  # noqa: SIM115 - see `close`
        self._digest = hashlib.sha256()
        self._size = self._status = 0
        self._headers: Headers = ()
        self._bodiless = call.arguments["method"] == "HEAD"

    async def head(self, status: int, headers: Headers) -> None:
        """Keep and pass on the status and the end-to-end headers."""
        if not 200 <= status <= 599:
            # 101 would be the end of HTTP on the client's connection, which no client has requested.
            raise ServerError(f"the server answered with status {status}, which ends no request")
        self._status, self._headers = status, of_tool_server(headers)
        # These responses have no body whatever their headers announce (RFC 9112, 6.3).
        self._bodiless = self._bodiless or status in (204, 304)
        if self._listener is not None:
            await self._listener.head(status, self._headers)

    async def data(self, chunk: bytes) -> None:
        """Keep and pass on a piece of the body. Raises MalformedResponseError if the rest takes too long for nobody."""
        if isinstance(self._listener, Leaving) and self._listener.gone:
            self._left_at = min(self._left_at, time.monotonic())
            # Calls of a rollout run one at a time: a response without end would hold up all that follow.
            if time.monotonic() - self._left_at > self._rest_s:
                raise MalformedResponseError(f"its response did not end within {self._rest_s:g} s of its client's end")
        # Size and digest go on beyond the limit: they stand for the body in the record.
        self._size += len(chunk)
        self._digest.update(chunk)
        if self.whole:
            self._file.write(chunk)
        # What was kept is of no use now. It is dropped at once, because the rest may take long.
        elif self._file.tell():
            self._file.seek(0)
            self._file.truncate()
        if self._listener is not None:
            await self._listener.data(chunk)

    @property
    def whole(self) -> bool:
        """Whether the whole body was kept."""
        return self._size <= self._max_bytes

    def result(self) -> ToolResult:
        """Return the response with a Content-Length; a body that was not kept is replaced by its size and digest."""
        if not self.whole:
            summary = {"size_bytes": self._size, "sha256": self._digest.hexdigest(), "status": self._status}
            return ToolResult(200, "application/vnd.forkpoint.unrecorded+json", orjson.dumps(summary))
        self._file.seek(0)
        headers = self._headers
        # The body's length is known by now; a response that came in chunks gets it as its framing.
        if not self._bodiless and not any(name.lower() == "content-length" for name, _ in headers):
            headers = (*headers, ("Content-Length", str(self._size)))
        return ToolResult(self._status, content_type(headers), self._file.read(), headers)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
