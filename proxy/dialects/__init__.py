"""Dialects: the bytes of a request become a call, and a result becomes the bytes of a response. Pure.

Process: the proxy.
May import: proxy, proxy.tree, sandboxes, sandboxes.tool_clients.
"""

from collections.abc import Callable, Mapping
from urllib.parse import unquote

from typing_extensions import override

from proxy.dialects import shell, sql
from proxy.dialects.base import Call, Dialect, Local, Request
from proxy.dialects.rule_based import Declared
from proxy.dialects.rule_schema import rules_of
from proxy.names import ONLY
from proxy.refusals import RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.plugins import DIALECTS as PLUGINS
from sandboxes.plugins import ENDPOINTS, installed, load
from sandboxes.spec import SERVER_DRIVERS, SHELLLESS_DRIVERS, EnvironmentSpec

Parse = Callable[[str, str, str, bytes, EnvironmentSpec], ToolCall]
"""Takes method, path below the endpoint, query, body and environment; returns the call or raises `RefusalError`."""

DIALECTS: Mapping[str, Parse] = {"shell": shell.parse, "sql": sql.parse}


class BuiltIn(Dialect):
    """A built-in endpoint: each request is a call, and all clients get the same response."""

    headers_matter = False

    def __init__(self, parse: Parse, spec: EnvironmentSpec) -> None:
        self._parse, self._spec = parse, spec

    @override
    def read(self, request: Request) -> Call | Local:
        path = unquote(request.path).removeprefix("/")
        try:
            call = self._parse(request.method, path, request.query, request.body, self._spec)
        except shell.UnrunnableCommandError as error:
            return Local(200, error.result())
        return Call(call, call_key(call))


def dialect_of(spec: EnvironmentSpec, endpoint: str) -> Dialect:
    """Return the dialect of an endpoint in a spec, or of its only server (`ONLY`). Raises RefusalError (404)."""
    if endpoint == ONLY and len(spec.servers) == 1:
        (endpoint,) = spec.servers
    # A server of the task comes first: names of built-in endpoints are reserved, those of plug-ins are not.
    if endpoint in spec.servers:
        server = spec.servers[endpoint]
        return Declared(endpoint, server, rules_of(server))
    if endpoint in installed(PLUGINS):
        dialect: Dialect | None = load(PLUGINS, endpoint)(spec)
        if dialect is not None:
            return dialect
    raise RefusalError(404, "no-such-endpoint", f"endpoints here are: {', '.join(_endpoints(spec))}.")


def _endpoints(spec: EnvironmentSpec) -> list[str]:
    """Return what an agent may use in this environment, for the error text."""
    names = {name for name in installed(PLUGINS) if load(PLUGINS, name)(spec) is not None} | spec.servers.keys()
    if not spec.upstreams:
        names |= installed(ENDPOINTS).keys()
        names = {"tvcache"} if spec.driver == "client" else names - {"tvcache"}
        names -= set() if spec.harness is not None else {"harness"}
        names -= set() if spec.driver in SERVER_DRIVERS else {"e2b"}
        names -= {"docker", "shell"} if spec.driver in SHELLLESS_DRIVERS else set()
        names -= set() if spec.databases else {"sql"}
    return sorted(names)
