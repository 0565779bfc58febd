"""Dialects: the bytes of a request become a call, and a result becomes the bytes of a response. Pure.

Process: the proxy.
"""

from collections.abc import Callable, Mapping
from urllib.parse import unquote

from proxy.dialects import shell, sql
from proxy.dialects.base import Call, Dialect, Local, Request, Response
from proxy.dialects.mcp import Mcp
from proxy.dialects.rule_based import Declared
from proxy.dialects.rule_schema import rules_of
from proxy.dialects.video import VideoDialect
from proxy.names import ONLY
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.spec import SERVER_DRIVERS, SHELLLESS_DRIVERS, EnvironmentSpec

Parse = Callable[[str, str, str, bytes, EnvironmentSpec], ToolCall]
"""method, path below the endpoint, query string, body, the rollout's spec -> call. Raises `RefusalError`."""

DIALECTS: Mapping[str, Parse] = {"shell": shell.parse, "sql": sql.parse}
"""The built-in endpoints by name."""


class BuiltIn:
    """A built-in endpoint as a dialect: each request is a call, and its answer is the same for all."""

    headers_matter = False

    def __init__(self, parse: Parse, spec: EnvironmentSpec) -> None:
        self._parse, self._spec = parse, spec

    def read(self, request: Request) -> Call:
        """See `Dialect.read`."""
        path = unquote(request.path).removeprefix("/")
        call = self._parse(request.method, path, request.query, request.body, self._spec)
        return Call(call, call_key(call))

    def answer(self, told: Response, request: Request) -> Response:  # noqa: ARG002 - others look at it
        """See `Dialect.answer`."""
        return told

    def problem(self, problem: Problem, request: Request) -> Local | None:  # noqa: ARG002
        """See `Dialect.problem`."""
        return None


def dialect_of(spec: EnvironmentSpec, endpoint: str) -> Dialect:
    """Return what reads requests to an endpoint of a task with this spec.

    Raises:
        Refused: 404, it has no such endpoint.
    """
    if endpoint == ONLY and len(spec.servers) == 1:
        (endpoint,) = spec.servers
    if endpoint in DIALECTS and not spec.upstreams:
        return BuiltIn(DIALECTS[endpoint], spec)
    if endpoint == "mcp" and not spec.upstreams:
        return Mcp(spec)
    if endpoint == "video" and spec.video is not None:
        return VideoDialect(spec)
    if endpoint in spec.servers:
        server = spec.servers[endpoint]
        return Declared(endpoint, server, rules_of(server))
    built_in = ["sql"] if spec.databases else []
    built_in += ["video"] if spec.video is not None else []
    built_in += ["mcp"] if not spec.upstreams else []
    built_in += ["e2b"] if spec.driver in SERVER_DRIVERS and not spec.upstreams else []
    built_in += ["docker", "shell"] if spec.driver not in SHELLLESS_DRIVERS and not spec.upstreams else []
    there = ", ".join(sorted([*built_in, *spec.servers]))
    raise RefusalError(404, "no-such-endpoint", f"endpoints here are: {there}.")
