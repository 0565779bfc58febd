"""MCP over streamable HTTP, in both forms of the protocol (pure).

Up to version 2025-11-25, `initialize` gives the client a session, which is the rollout. The version 2026-07-28
("modern" below) has no sessions, so the URL must name the rollout.

`/mcp` offers the built-in tools and those of all of the task's MCP servers, `/mcp/{name}` those of one. The key of a
call is the tool's name and arguments, without ID, `_meta` and headers; `answer` puts the result under the request's ID.
"""

from dataclasses import dataclass, replace
from typing import Any

import orjson
from typing_extensions import override

from proxy.dialects import base, builtin_tools, video
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients.json_text import exceeds_64_bits, parse_json

MODERN = "2026-07-28"
HANDSHAKES = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
_JSON = (("content-type", "application/json"),)
_STREAM = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
SESSION = "mcp-session-id"
_LISTS = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
_READS = frozenset({"resources/read", "prompts/get", "completion/complete"})
_STATUS = {-32700: 400, -32600: 400, -32602: 400, -32601: 404, -32022: 400}
"""HTTP statuses of error codes in the modern version. In older ones every JSON-RPC error has status 200."""
_MALFORMED, _NOT_FOUND, _INVALID, _UNSUPPORTED = -32700, -32601, -32602, -32022
_NO_SUCH = dict.fromkeys(
    ("resources/subscribe", "resources/unsubscribe", "subscriptions/listen"),
    "subscriptions are not supported behind Forkpoint: a resource is read at the rollout's state, with resources/read.",
)
_VERSION_META = "io.modelcontextprotocol/protocolVersion"


@dataclass(frozen=True, slots=True)
class _Message:
    method: str  # Empty for a response, which the proxy never asks for.
    params: dict[str, Any]  # `_meta` is always there.
    id: Any  # None for a notification.
    fault: str  # What is wrong with its texts; empty for nothing.
    modern: bool  # Whether the client speaks the version without sessions.


class Mcp(base.Eventful):
    """The dialect of a task's MCP endpoint."""

    headers_matter = True

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._names = tuple(spec.mcp_servers)
        self._tools = builtin_tools.of(spec)
        # With variants of videos, requests of the same bytes are different calls of different rollouts.
        alike = spec.video is None or spec.video.variants == 1
        self.deciding = (b"accept", b"mcp-protocol-version") if alike else None

    # -- requests ----------------------------------------------------------------------------------------------------

    @override
    def read(self, request: base.Request) -> base.Meaning:
        server = self._server(request)
        if request.method == "DELETE":
            # A session that the proxy named is the rollout, and ends with it. A rollout that the URL names goes on.
            return (
                base.Local(204, headers=())
                if request.rollout
                else base.Close(self._rollout(request), base.Local(204, headers=()))
            )
        if request.method != "POST":
            return base.Local(405, headers=(("allow", "POST, DELETE"),))
        message = _message_of(request)
        if message.id is None:
            return self._notification(message, request)
        match message.method:
            case "initialize":
                return self._begin(message, request, server)
            case "server/discover":
                return _result(message, {"supportedVersions": [MODERN, *HANDSHAKES], **self._about(server)})
            case "ping" | "logging/setLevel":
                return replace(_result(message, {}), within=_session_of(request))
            case "tools/call":
                return self._checked(message, request, server)
            case method if method in _LISTS:
                return self._list(message, request, server)
            case method if method in _READS:
                return self._forward(message, request, self._only(server), message.params)
        raise _McpError(
            _NOT_FOUND, _NO_SUCH.get(message.method, f"there is no method {message.method!r} behind Forkpoint.")
        )

    def _notification(self, message: _Message, request: base.Request) -> base.Meaning:
        """Return the meaning of a notification: a cancellation goes to the call, all others are only accepted."""
        accepted = base.Local(202, headers=(), within=_session_of(request))
        rollout = request.rollout or _session_of(request)
        if message.method != "notifications/cancelled" or not rollout:
            return accepted
        return base.Cancel(rollout, _cancel_name(message.params.get("requestId")), accepted)

    def _server(self, request: base.Request) -> str:
        """Return the server that the path names; empty for all servers."""
        name = request.path.strip("/")
        # Some clients append `/mcp` to every URL that does not end with it.
        if name not in self._names:
            name = "" if name == "mcp" else name.removesuffix("/mcp")
        if name and name not in self._names:
            paths = ", ".join(f"/mcp/{known}" for known in self._names) or "only /mcp, with the built-in tools"
            raise RefusalError(404, "no-such-server", f"this task has no MCP server {name!r}. Use {paths}.")
        return name

    def _only(self, server: str) -> str:
        """Return the only server that a request can mean. Raises _McpError if there are several servers, or none."""
        if server or len(self._names) == 1:
            return server or self._names[0]
        paths = ", ".join(f"/mcp/{name}" for name in self._names)
        why = f"this method needs one server. Use {paths}." if paths else "this task has no MCP server."
        raise _McpError(_NOT_FOUND, why)

    def _begin(self, message: _Message, request: base.Request, server: str) -> base.Meaning:
        wanted = message.params.get("protocolVersion")
        version = wanted if wanted in HANDSHAKES else HANDSHAKES[0]
        reply = _result(message, {"protocolVersion": version, **self._about(server)})
        if request.rollout:
            return reply
        name = f"mcp-{request.fresh}"
        return base.Open(name, reply, headers=((SESSION, name),))

    def _about(self, server: str) -> dict[str, Any]:
        capabilities: dict[str, Any] = {"tools": {}}
        if server or len(self._names) == 1:
            capabilities |= {"resources": {}, "prompts": {}, "completions": {}, "logging": {}}
        title = f"forkpoint: {server}" if server else "forkpoint"
        return {"capabilities": capabilities, "serverInfo": {"name": title, "version": "1"}}

    def _rollout(self, request: base.Request) -> str:
        name = request.rollout or request.header(SESSION)
        if not name:
            raise RefusalError(
                400,
                "no-rollout",
                "the request names no rollout. Use /t/{task}/r/{rollout}/mcp, or with a session-based client call "
                "initialize first and send its Mcp-Session-Id.",
            )
        return name

    def _list(self, message: _Message, request: base.Request, server: str) -> base.Meaning:
        if message.params.get("cursor") is not None:
            raise _McpError(_INVALID, "lists are complete and have no cursor. Leave the cursor out.")
        if not (server or self._names):
            items = self._listed() if message.method == "tools/list" else []
            return replace(_result(message, {_LISTS[message.method]: items}), within=_session_of(request))
        servers = ",".join([server] if server else self._names)
        # What a server offers depends on what its tools did: some have tools that load further ones.
        return self._forward(message, request, servers, {}, shared_at_root=True)

    def _listed(self) -> list[dict[str, Any]]:
        return [tool.listed() for tool in self._tools.values()]

    def _checked(self, message: _Message, request: base.Request, server: str) -> base.Call | base.Local:
        """Return what a call of a tool means: a model reads what is wrong with its arguments, as the tool's result."""
        name, arguments = message.params.get("name"), message.params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _McpError(_INVALID, "tools/call takes a name, and arguments as an object.")
        self._rollout(request)
        try:
            return self._tool(message, request, server, name, arguments)
        except _ArgumentsError as error:
            return replace(_result(message, builtin_tools.refused(str(error))), within=_session_of(request))

    def _tool(
        self, message: _Message, request: base.Request, server: str, name: str, arguments: dict[str, Any]
    ) -> base.Call:
        if message.fault:
            raise _ArgumentsError(message.fault)
        if not server and name in self._tools:
            try:
                # Null stands for an argument that is not given: `tools/list` says so of all optional ones.
                given = {member: value for member, value in arguments.items() if value is not None}
                call = video.for_rollout(self._tools[name].call(given, self._spec), self._rollout(request), self._spec)
            # What is read may be nested more deeply than what can be written.
            except (RefusalError, orjson.JSONEncodeError) as error:
                raise _ArgumentsError(str(error)) from error
            return replace(self._named(request, call), events=True)
        if not server and len(self._names) > 1:
            server, _, name = name.partition("__")
        elif not server and self._names:
            server = self._names[0]
        if server not in self._names or not name:
            raise _McpError(_INVALID, f"there is no tool {message.params['name']!r}. Call tools/list for the tools.")
        # Other members go to the server too, because it may read them.
        params = {**message.params, "name": name, "arguments": arguments}
        forwarded = self._forward(message, request, server, params)
        # Without sessions, a client cancels a call by closing the stream of its response.
        return replace(forwarded, streams=True, events=True, cancel=_cancel_name(message.id), hangup=message.modern)

    def _forward(
        self,
        message: _Message,
        request: base.Request,
        server: str,
        params: dict[str, Any],
        *,
        shared_at_root: bool = False,
    ) -> base.Call:
        identity = {member: value for member, value in params.items() if member != "_meta"}
        tool = str(params["name"]) if message.method == "tools/call" else message.method
        call = ToolCall("mcp", tool, {"server": server, "method": message.method, "params": identity})
        return self._named(request, call, shared_at_root=shared_at_root)

    def _named(self, request: base.Request, call: ToolCall, *, shared_at_root: bool = False) -> base.Call:
        rollout = _session_of(request) if shared_at_root else self._rollout(request)
        return base.Call(
            call, call_key(call), rollout=rollout, bound=True, shared_at_root=shared_at_root,
            existing=bool(rollout) and not request.rollout,
        )  # fmt: skip

    # -- answers -----------------------------------------------------------------------------------------------------

    @override
    def answer(self, response: base.Response, request: base.Request) -> base.Response:
        message = _message_of(request)
        payload = self._payload(response, message, request)
        notes = (_note_for(note, message) for note in payload.get("notifications", []))
        messages = [_event(orjson.dumps(note)) for note in notes if note is not None]
        local = _response_to(message, payload)
        if messages or not _accepts(request, "application/json"):
            return base.Response(200, _STREAM, b"".join([*messages, _event(local.body)]))
        return base.Response(local.status, local.headers, local.body)

    def _payload(self, response: base.Response, message: _Message, request: base.Request) -> dict[str, Any]:
        """Return the payload of a recorded response: notifications, and a result or an error."""
        if message.method == "tools/call" and dict(response.headers).get("content-type") != builtin_tools.RECORDED:
            return {"result": builtin_tools.result_of(self._tools[message.params["name"]], response)}
        payload: dict[str, Any] = parse_json(response.body)
        if message.method == "tools/list" and "result" in payload and not self._server(request):
            payload["result"] = {**payload["result"], "tools": [*self._listed(), *payload["result"]["tools"]]}
        return payload

    @override
    def takes_events(self, request: base.Request) -> bool:
        return _accepts(request, "text/event-stream")

    @override
    def event(self, message: bytes, request: base.Request) -> bytes:
        note = _note_for(parse_json(message), _message_of(request))
        return b"" if note is None else _event(orjson.dumps(note))

    @override
    def last_event(self, response: base.Response, request: base.Request) -> bytes:
        message = _message_of(request)
        return _event(_response_to(message, self._payload(response, message, request)).body)

    @override
    def problem(self, problem: Problem, request: base.Request) -> base.Local | None:
        try:
            message = _message_of(request)
        except RefusalError:
            message = _NOTHING
        code = problem.code or (-32603 if problem.status >= 500 or problem.status == 429 else -32600)
        data: dict[str, Any] = {"type": f"urn:forkpoint:{problem.slug}", "status": problem.status}
        if code == _UNSUPPORTED:
            data |= {"supported": [MODERN, *HANDSHAKES], "requested": request.header("mcp-protocol-version")}
        if problem.retry_after_s is not None:
            data["retryAfterS"] = problem.retry_after_s
        error = {"error": {"code": code, "message": problem.detail, "data": data}}
        status = problem.status if problem.slug in _OF_HTTP else None
        return _response_to(message, error, status)


_OF_HTTP = frozenset({"session", "no-rollout", "no-such-server", "token", "json", "version"})
"""Problems that keep their HTTP status. On a 404 for its session a client begins another session, for example."""


class _McpError(RefusalError):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(400, "mcp", detail)
        self.code = code


class _ArgumentsError(Exception):
    """The arguments of a tool do not fit it."""


_NOTHING = _Message("", {}, None, "", modern=False)


def _session_of(request: base.Request) -> str:
    """Return the session that a request names, which must be running; empty if the URL names the rollout."""
    return "" if request.rollout else request.header(SESSION)


def _message_of(request: base.Request) -> _Message:
    """Return the message in a request's body, which is parsed once, also if it is refused."""
    if "message" not in request.parsed:
        request.parsed["message"] = None
        request.parsed["message"] = _parsed_message(request)
    message: _Message | None = request.parsed["message"]
    if message is None:
        raise RefusalError(400, "json", "the body was refused.")
    return message


def _parsed_message(request: base.Request) -> _Message:
    fault = ""
    try:
        value = base.json_object(request.body, "one JSON-RPC 2.0 message", status=400)
    except base.MalformedJsonError as error:
        error.code = _MALFORMED
        raise
    except base.LoneSurrogateError as error:
        if error.value.get("method") != "tools/call":
            raise
        value, fault = error.value, str(error)
    if value.get("jsonrpc") != "2.0":
        raise RefusalError(400, "json", "the body must be one JSON-RPC 2.0 message.")
    if not fault and exceeds_64_bits(request.body):
        raise RefusalError(400, "json", "a number exceeds 64 bits. Send it as a string.")
    params = value.get("params") or {}
    if not isinstance(params, dict) or not isinstance(value.get("id"), str | int | None):
        raise RefusalError(400, "json", "params must be an object, and an id a string or an integer.")
    if "method" not in value:
        # A response. The proxy sends clients no requests, so the response is accepted and dropped.
        return _NOTHING
    meta = params.get("_meta")
    version = request.header("mcp-protocol-version") or (meta.get(_VERSION_META) if isinstance(meta, dict) else "")
    if version and version != MODERN and version not in HANDSHAKES:
        raise _UnsupportedError(str(version))
    params = {**params, "_meta": meta or {}}
    return _Message(str(value["method"]), params, value.get("id"), fault, modern=version == MODERN)


class _UnsupportedError(_McpError):
    """The client speaks a version of the protocol that is not supported."""

    def __init__(self, version: str) -> None:
        super().__init__(
            _UNSUPPORTED, f"unsupported protocol version {version[:40]!r}: {MODERN}, {', '.join(HANDSHAKES)}."
        )
        self.slug = "version"


def _result(message: _Message, result: dict[str, Any]) -> base.Local:
    return _response_to(message, {"result": result})


def _response_to(message: _Message, payload: dict[str, Any], status: int | None = None) -> base.Local:
    """Return the response with a payload's result or error, in the form of the version that the client speaks."""
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": message.id}
    if "error" in payload:
        body["error"] = payload["error"]
        status = status or (_STATUS.get(payload["error"].get("code"), 200) if message.modern else 200)
        return base.Local(status, orjson.dumps(body), _JSON)
    body["result"] = payload.get("result", {})
    if message.modern:
        cached = {"ttlMs": 0, "cacheScope": "private"}
        lasting = message.method in _LISTS or message.method in ("server/discover", "resources/read")
        body["result"] = {"resultType": "complete", **(cached if lasting else {}), **body["result"]}
    return base.Local(200, orjson.dumps(body), _JSON)


def _note_for(note: dict[str, Any], message: _Message) -> dict[str, Any] | None:
    """Return a server's notification under the progress token of a request; None if the client does not want it."""
    params, progress = note.get("params", {}), message.params["_meta"].get("progressToken")
    if note["method"] == "notifications/progress":
        if progress is None:
            return None
        params = {**params, "progressToken": progress}
    elif message.modern:
        # In the modern version, logs and changes of lists are only for clients that subscribe, and none can here.
        return None
    return {"jsonrpc": "2.0", "method": note["method"], "params": params}


def _event(message: bytes) -> bytes:
    return b"event: message\ndata: " + message + b"\n\n"


def _cancel_name(request_id: object) -> str:
    """Return the name under which a client may cancel a call. The IDs 1 and "1" have different names."""
    return repr(request_id)


def _accepts(request: base.Request, media_type: str) -> bool:
    """Return whether a client accepts a media type. A client without an `Accept` header accepts JSON."""
    accepted = request.header("accept")
    if media_type in accepted or f"{media_type.partition('/')[0]}/*" in accepted:
        return True
    return media_type == "application/json" and (not accepted or "*/*" in accepted)
