"""A call to a tool server inside a sandbox: from its arguments to a request, from what comes back to a result."""

import hashlib
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

import orjson

from sandboxes.calls import ToolCall, ToolResult, content_type
from sandboxes.errors import SandboxError
from sandboxes.http_message import InvalidRequestError, end_to_end, request_head
from sandboxes.ipc.messages import ServerOrder
from sandboxes.listener import Headers, Listener
from sandboxes.spec import EnvironmentSpec

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_IN_MEMORY = 1 << 20


def order(name: str, spec: EnvironmentSpec, environment: Mapping[str, str]) -> ServerOrder:
    """Return what a sandbox must know to start and to reach a tool server of the spec (pure).

    Args:
        name: The server's name in the spec.
        spec: The spec.
        environment: Variables below those of the spec and of the server.
    """
    server = spec.hosted[name]
    return ServerOrder(
        name=name,
        command=server.command,
        port=server.port,
        environment={**environment, **spec.env, **server.env},
        workdir=spec.workdir,
        ready=server.ready,
        ready_s=server.ready_s,
    )


def mcp_order(name: str, spec: EnvironmentSpec, environment: Mapping[str, str]) -> ServerOrder:
    """Return the same for an MCP server of the spec; over stdio it has no port (pure)."""
    server = spec.mcp_servers[name]
    if server.command is None:
        return order(next(other for other in spec.hosted if spec.hosted[other].port == server.port), spec, environment)
    return ServerOrder(
        name=f"mcp {name}",
        command=f"exec {shlex.join([server.command, *server.args])}",
        port=server.port,
        environment={**environment, **spec.env, **server.env},
        workdir=server.cwd or spec.workdir,
        ready="tcp",
        ready_s=server.ready_s,
    )


def request(call: ToolCall, port: int) -> bytes:
    """Return the head of the request that call makes to the server on port (pure).

    Raises:
        SandboxError: it makes none. Dialects refuse such calls before.
    """
    arguments = call.arguments
    headers = ((name, value) for name, value in arguments["headers"])
    try:
        return request_head(arguments["method"], arguments["target"], headers, f"127.0.0.1:{port}", len(call.body))
    except InvalidRequestError as error:
        raise SandboxError(f"the call cannot be sent to its server: {error}") from error


def reads(call: ToolCall) -> bool:
    """Whether call is said to change nothing in the server's memory, by rule or by its method (pure)."""
    effect = call.arguments.get("effect")
    return effect == "read" or (effect is None and call.arguments["method"] in _READS)


def volatile(call: ToolCall) -> bool:
    """Whether call's answer is for this rollout and moment alone, by rule (pure)."""
    return call.arguments.get("cache") == "never"


class Spool(Listener):
    """Keeps the answer to call as it comes, most bytes of it at most, and passes it on. Beyond 1 MB it lies in folder.

    A listener never raises: that a client went away is no failure of the server.
    """

    def __init__(self, call: ToolCall, listener: Listener | None, *, most: int, folder: Path) -> None:
        self._listener, self._most = listener, most
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY, dir=str(folder))  # noqa: SIM115 - see `close`
        self._digest = hashlib.sha256()
        self._size = self._status = 0
        self._headers: Headers = ()
        self._bodiless = call.arguments["method"] == "HEAD"

    async def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, end_to_end(headers)
        self._bodiless = self._bodiless or status in (204, 304)
        if self._listener is not None:
            await self._listener.head(status, self._headers)

    async def data(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._digest.update(chunk)
        if self.whole:
            self._file.write(chunk)
        elif self._file.tell():
            self._file.seek(0)
            self._file.truncate()
        if self._listener is not None:
            await self._listener.data(chunk)

    @property
    def whole(self) -> bool:
        """Whether all of the answer was kept."""
        return self._size <= self._most

    def result(self) -> ToolResult:
        """Return the answer, its length among its headers.

        One that was not kept is told by its size and digest, which a replay must meet too.
        """
        if not self.whole:
            told = {"size_bytes": self._size, "sha256": self._digest.hexdigest(), "status": self._status}
            return ToolResult(200, "application/vnd.forkpoint.unrecorded+json", orjson.dumps(told))
        self._file.seek(0)
        headers = self._headers
        if not self._bodiless and not any(name.lower() == "content-length" for name, _ in headers):
            headers = (*headers, ("Content-Length", str(self._size)))
        return ToolResult(self._status, content_type(headers), self._file.read(), headers)

    def close(self) -> None:
        self._file.close()
