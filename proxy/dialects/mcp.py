"""MCP over streamable HTTP, both wires: 2025-11-25 and before, with a session, and 2026-07-28, without one (pure).

`/mcp` offers the built-in tools and those of all of the task's MCP servers, `/mcp/{name}` those of one server alone.
A tool call is the call; its key is the tool's name and arguments, not the request's id, `_meta` or headers.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import orjson

from proxy.dialects import builtin_tools as mcp_tools
from proxy.dialects import video
from proxy.dialects.base import Call, Cancel, Close, Local, Meaning, Open, Request, Response
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec

MODERN = "2026-07-28"
HANDSHAKES = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
_JSON = (("content-type", "application/json"),)
_STREAM = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
_SESSION = "mcp-session-id"
_LISTS = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
_READS = frozenset({"resources/read", "prompts/get", "completion/complete"})
_STATUS = {-32700: 400, -32600: 400, -32602: 400, -32601: 404, -32022: 400}
"""Of errors, on the modern wire; before it they are answers of status 200."""
_NOT_FOUND, _INVALID, _UNSUPPORTED = -32601, -32602, -32022
_NO_SUCH = dict.fromkeys(
    ("resources/subscribe", "resources/unsubscribe", "subscriptions/listen"),
    "subscriptions are not supported behind Forkpoint: a resource is read at the rollout's state, with resources/read.",
)
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
"""A parser may silently make a float of one."""
_VERSION_META = "io.modelcontextprotocol/protocolVersion"


@dataclass(frozen=True, slots=True)
class _Asked:
    """One JSON-RPC message from a client. id: None for a notification."""

    method: str
    params: dict[str, Any]
    id: Any
    modern: bool


class Mcp:
    """See `Dialect`."""

    headers_matter = True

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._names = tuple(spec.mcp_servers)
        self._tools = mcp_tools.of(spec)

    # -- requests ----------------------------------------------------------------------------------------------------

    def read(self, request: Request) -> Meaning:
        """See `Dialect.read`."""
        server = self._server(request)
        if request.method == "DELETE":
            # Clients of one rollout may come and go; a session that we named is the rollout.
            return Local(204, headers=()) if request.rollout else Close(self._rollout(request), Local(204, headers=()))
        if request.method != "POST":
            return Local(405, headers=(("allow", "POST, DELETE"),))
        asked = _asked(request)
        if asked.id is None:
            return self._notified(asked, request)
        match asked.method:
            case "initialize":
                return self._begin(asked, request, server)
            case "server/discover":
                return _result(asked, {"supportedVersions": [MODERN, *HANDSHAKES], **self._about(server)})
            case "ping" | "logging/setLevel":
                return _result(asked, {})
            case "tools/call":
                return self._tool(asked, request, server)
            case method if method in _LISTS:
                return self._list(asked, request, server)
            case method if method in _READS:
                return self._ask(asked, request, self._only(server), asked.params)
        raise _Error(_NOT_FOUND, _NO_SUCH.get(asked.method, f"there is no method {asked.method!r} behind Forkpoint."))

    def _notified(self, asked: _Asked, request: Request) -> Meaning:
        """Say what a notification means: one that cancels a call is for its server, all others are for nobody."""
        taken, rollout = Local(202, headers=()), request.rollout or request.header(_SESSION)
        if asked.method != "notifications/cancelled" or not rollout:
            return taken
        return Cancel(rollout, _cancel_name(asked.params.get("requestId")), taken)

    def _server(self, request: Request) -> str:
        """Return the server that the path names; empty for all of them."""
        name = request.path.strip("/")
        if name and name not in self._names:
            there = ", ".join(f"/mcp/{known}" for known in self._names) or "only /mcp, with the built-in tools"
            raise RefusalError(404, "no-such-server", f"there is no MCP server {name!r} here: {there}.")
        return name

    def _only(self, server: str) -> str:
        """Return the one server that a request can mean.

        Raises:
            _Error: there are several, or none.
        """
        if server or len(self._names) == 1:
            return server or self._names[0]
        raise _Error(_NOT_FOUND, f"this is asked of one server: use {', '.join(f'/mcp/{n}' for n in self._names)}.")

    def _begin(self, asked: _Asked, request: Request, server: str) -> Meaning:
        wanted = asked.params.get("protocolVersion")
        version = wanted if wanted in HANDSHAKES else HANDSHAKES[0]
        told = _result(asked, {"protocolVersion": version, **self._about(server)})
        if request.rollout:
            return told
        name = f"mcp-{request.fresh}"
        return Open(name, told, headers=((_SESSION, name),))

    def _about(self, server: str) -> dict[str, Any]:
        capabilities: dict[str, Any] = {"tools": {}}
        if server or len(self._names) == 1:
            capabilities |= {"resources": {}, "prompts": {}, "completions": {}, "logging": {}}
        title = f"forkpoint: {server}" if server else "forkpoint"
        return {"capabilities": capabilities, "serverInfo": {"name": title, "version": "1"}}

    def _rollout(self, request: Request) -> str:
        name = request.rollout or request.header(_SESSION)
        if not name:
            raise RefusalError(
                400,
                "no-rollout",
                "nothing says which rollout asks: on the wire without sessions the URL must, as "
                "/t/{task}/r/{rollout}/mcp; on the other one, send initialize first, and its Mcp-Session-Id.",
            )
        return name

    def _list(self, asked: _Asked, request: Request, server: str) -> Meaning:
        if asked.params.get("cursor") is not None:
            raise _Error(_INVALID, "lists come whole: there is no cursor.")
        if not (server or self._names):
            return _result(asked, {_LISTS[asked.method]: self._listed() if asked.method == "tools/list" else []})
        asking = ",".join([server] if server else self._names)
        return self._ask(asked, request, asking, {}, constant=True)

    def _listed(self) -> list[dict[str, Any]]:
        return [tool.listed() for tool in self._tools.values()]

    def _tool(self, asked: _Asked, request: Request, server: str) -> Call:
        name, arguments = asked.params.get("name"), asked.params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _Error(_INVALID, "tools/call takes a name, and arguments as an object.")
        if not server and name in self._tools:
            try:
                call = self._tools[name].call(arguments, self._spec)
            except RefusalError as error:
                raise _Error(_INVALID, str(error)) from error
            call = video.for_rollout(call, self._rollout(request), self._spec)
            return replace(self._named(request, call), events=True)
        if not server and len(self._names) > 1:
            server, _, name = name.partition("__")
        elif not server and self._names:
            server = self._names[0]
        if server not in self._names or not name:
            raise _Error(_INVALID, f"there is no tool {asked.params['name']!r}: tools/list says which there are.")
        # What is not of the wire but of the call goes on: a server may look at other members too.
        params = {**asked.params, "name": name, "arguments": arguments}
        asking = self._ask(asked, request, server, params)
        # On the wire without sessions, who closes the stream has cancelled.
        return replace(asking, streams=True, events=True, cancel=_cancel_name(asked.id), hangup=asked.modern)

    def _ask(
        self, asked: _Asked, request: Request, server: str, params: dict[str, Any], *, constant: bool = False
    ) -> Call:
        told = {member: value for member, value in params.items() if member != "_meta"}
        tool = str(params["name"]) if asked.method == "tools/call" else asked.method
        call = ToolCall("mcp", tool, {"server": server, "method": asked.method, "params": told})
        return self._named(request, call, constant=constant)

    def _named(self, request: Request, call: ToolCall, *, constant: bool = False) -> Call:
        rollout = "" if constant else self._rollout(request)
        return Call(
            call, call_key(call), rollout=rollout, bound=True, constant=constant,
            existing=not request.rollout and not constant,
        )  # fmt: skip

    # -- answers -----------------------------------------------------------------------------------------------------

    def answer(self, told: Response, request: Request) -> Response:
        """See `Dialect.answer`: the recorded result under this request's id."""
        asked = _asked(request)
        said = self._said(told, asked, request)
        notes = (_for(note, asked) for note in said.get("notifications", []))
        messages = [_event(orjson.dumps(note)) for note in notes if note is not None]
        local = _answered(asked, said)
        if messages or not _takes(request, "application/json"):
            return Response(200, _STREAM, b"".join([*messages, _event(local.body)]))
        return Response(local.status, local.headers, local.body)

    def _said(self, told: Response, asked: _Asked, request: Request) -> dict[str, Any]:
        """Return what a record says: notifications, and a result or an error."""
        if asked.method == "tools/call" and dict(told.headers).get("content-type") != mcp_tools.RECORDED:
            return {"result": mcp_tools.shown(self._tools[asked.params["name"]], told)}
        said: dict[str, Any] = orjson.loads(told.body)
        if asked.method == "tools/list" and "result" in said and not self._server(request):
            said["result"] = {**said["result"], "tools": [*self._listed(), *said["result"]["tools"]]}
        return said

    def takes_events(self, request: Request) -> bool:
        """See `Eventful.takes_events`."""
        return _takes(request, "text/event-stream")

    def event(self, said: bytes, request: Request) -> bytes:
        """See `Eventful.event`."""
        note = _for(orjson.loads(said), _asked(request))
        return b"" if note is None else _event(orjson.dumps(note))

    def last_event(self, told: Response, request: Request) -> bytes:
        """See `Eventful.last_event`."""
        asked = _asked(request)
        return _event(_answered(asked, self._said(told, asked, request)).body)

    def problem(self, problem: Problem, request: Request) -> Local | None:
        """See `Dialect.problem`: a JSON-RPC error. A session that is gone is 404, on which clients begin another."""
        try:
            asked = _asked(request)
        except RefusalError:
            asked = _Asked("", {}, None, modern=False)
        code = problem.code or (-32603 if problem.status >= 500 or problem.status == 429 else -32600)
        data: dict[str, Any] = {"type": f"urn:forkpoint:{problem.slug}", "status": problem.status}
        if code == _UNSUPPORTED:
            data |= {"supported": [MODERN, *HANDSHAKES], "requested": request.header("mcp-protocol-version")}
        if problem.retry_after_s is not None:
            data["retryAfterS"] = problem.retry_after_s
        error = {"error": {"code": code, "message": problem.detail, "data": data}}
        status = problem.status if problem.slug in _OF_HTTP else None
        return _answered(asked, error, status)


_OF_HTTP = frozenset({"session", "no-rollout", "no-such-server", "token", "json", "version"})
"""Problems that clients look for in the status, whatever the JSON says."""


class _Error(RefusalError):
    """A JSON-RPC error of this code."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(400, "mcp", detail)
        self.code = code


def _asked(request: Request) -> _Asked:
    try:
        value = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, "json", f"the body is not JSON: {error}.") from None
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        raise RefusalError(400, "json", "the body must be one JSON-RPC 2.0 message.")
    if _LONG_NUMBER.search(request.body) and _exceeds_64_bits(json.loads(request.body)):
        raise RefusalError(400, "json", "a number is beyond 64 bits: send it as a string.")
    params = value.get("params") or {}
    if not isinstance(params, dict) or not isinstance(value.get("id"), str | int | None):
        raise RefusalError(400, "json", "params must be an object, and an id a string or an integer.")
    if "method" not in value:
        # A response to what we never asked: taken, and dropped.
        return _Asked("", {}, None, modern=False)
    meta = params.get("_meta")
    version = request.header("mcp-protocol-version") or (meta.get(_VERSION_META) if isinstance(meta, dict) else "")
    if version and version != MODERN and version not in HANDSHAKES:
        raise _UnsupportedError(str(version))
    return _Asked(str(value["method"]), {**params, "_meta": meta or {}}, value.get("id"), modern=version == MODERN)


def _exceeds_64_bits(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_exceeds_64_bits(member) for member in value.values())
    if isinstance(value, list):
        return any(_exceeds_64_bits(item) for item in value)
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


class _UnsupportedError(_Error):
    """A version of the protocol that nobody here speaks."""

    def __init__(self, version: str) -> None:
        super().__init__(
            _UNSUPPORTED, f"unsupported protocol version {version[:40]!r}: {MODERN}, {', '.join(HANDSHAKES)}."
        )
        self.slug = "version"


def _result(asked: _Asked, result: dict[str, Any]) -> Local:
    return _answered(asked, {"result": result})


def _answered(asked: _Asked, said: dict[str, Any], status: int | None = None) -> Local:
    """Return the response to asked, of said's result or error, as asked's wire has it."""
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": asked.id}
    if "error" in said:
        body["error"] = said["error"]
        at_modern = _STATUS.get(said["error"].get("code"), 200) if asked.modern else 200
        return Local(status or at_modern, orjson.dumps(body), _JSON)
    body["result"] = said.get("result", {})
    if asked.modern:
        cached = {"ttlMs": 0, "cacheScope": "private"}
        lasting = asked.method in _LISTS or asked.method in ("server/discover", "resources/read")
        body["result"] = {"resultType": "complete", **(cached if lasting else {}), **body["result"]}
    return Local(200, orjson.dumps(body), _JSON)


def _for(note: dict[str, Any], asked: _Asked) -> dict[str, Any] | None:
    """Return a server's notification for who asked, under its progress token; None where it wants none of it."""
    params, progress = note.get("params", {}), asked.params["_meta"].get("progressToken")
    if note["method"] == "notifications/progress":
        if progress is None:
            return None
        params = {**params, "progressToken": progress}
    elif asked.modern:
        # Logs are for who asks for them there, and changes of lists for who subscribes.
        return None
    return {"jsonrpc": "2.0", "method": note["method"], "params": params}


def _event(message: bytes) -> bytes:
    return b"event: message\ndata: " + message + b"\n\n"


def _cancel_name(request_id: object) -> str:
    """Return the name of a call for who may cancel it: 1 and "1" are two."""
    return repr(request_id)


def _takes(request: Request, media_type: str) -> bool:
    """Whether a client takes answers of a type. One that says nothing takes JSON."""
    accepted = request.header("accept")
    if media_type in accepted or f"{media_type.partition('/')[0]}/*" in accepted:
        return True
    return media_type == "application/json" and (not accepted or "*/*" in accepted)
