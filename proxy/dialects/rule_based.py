"""The dialect of a tool server, made of rules (pure).

`read` finds the first rule that fits a request's method, path and body: what the request means, and which parts of it
are the call's key. Names that differ between clients must be neither in keys nor in records, so they are replaced on
the way in and put back on the way out:

1. The rollout's name in bound fields of a body (`bind`) is recorded as `OUR_NAME`.
2. Names that a client chose on a WebSocket (`alias`) are recorded as `forkpoint-{path}`.
3. The proxy's address in `Origin` and `Referer` becomes the server's. The server's address in `Location`,
   `Content-Location` and `Set-Cookie` becomes the address under which the client knows the endpoint.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import orjson
from typing_extensions import override

from proxy.dialects.base import Call, Close, Dialect, Local, Meaning, Open, Request, Response
from proxy.dialects.body_forms import body_form, json_value, media_type, query_form
from proxy.dialects.rule_schema import Rule, RuleReply, Rules, without
from proxy.names import ROLLOUT_TOKEN, named
from proxy.patterns import PathPattern, path_pattern
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.http_message import HOP_BY_HOP, InvalidRequestError, request_head
from sandboxes.listener import Headers
from sandboxes.server_spec import Server, Upstream
from sandboxes.tool_clients.json_paths import OUR_NAME, member, renamed

NOISE = HOP_BY_HOP | {
    "host", "content-length", "expect", "user-agent", "date", "forwarded", "via", "x-forwarded-for",
    "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "x-request-id", "x-correlation-id", "traceparent",
    "tracestate", "baggage", "sentry-trace", "x-forkpoint-task", "x-forkpoint-rollout", "x-forkpoint-labels",
    "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions",
}  # fmt: skip
"""Headers that do not change what a request means, so that they are not in keys by default.

`idempotency-key` is none: the same request means another one with a new key, and nothing with one that was used.
"""
_IDENTITY = frozenset({"x-forkpoint-task", "x-forkpoint-rollout", "x-forkpoint-labels"})
"""Headers that tell the proxy about the rollout, and do not go to the server."""
_ADDRESSES = frozenset({"origin", "referer"})
"""Headers in which a client sends the address under which it knows the server."""


@dataclass(frozen=True, slots=True)
class _Route:
    methods: frozenset[str]
    path: PathPattern
    rule: Rule


class Declared(Dialect):
    """The dialect of one endpoint: of a tool server, or of the server elsewhere that requests are forwarded to."""

    headers_matter = True

    def __init__(self, endpoint: str, server: Server | Upstream, rules: Rules) -> None:
        self._endpoint, self._rules = endpoint, rules
        self._origins, self._prefix = _origins_of(server)
        self._upstream = urlsplit(self._origins[0]).netloc
        self._outside = isinstance(server, Upstream)
        self._opens = any(rule.do == "open" for rule in rules.rule)
        self._routes = [_route(rule) for rule in rules.rule]

    # -- requests ----------------------------------------------------------------------------------------------------

    @override
    def read(self, request: Request) -> Meaning:
        fields = _Fields(request)
        rule, captures = self._rule(request, fields)
        fields.captures = captures
        if rule.do == "health":
            assert rule.reply is not None
            return _local(rule.reply)
        rollout = "" if rule.stateless else self._rollout(request, rule, fields)
        if rule.do == "close":
            assert rule.reply is not None
            return Close(rollout, self._bound_reply(rule.reply, rollout))
        if rule.do == "open":
            parent = _name(fields.value(rule.parent)) if rule.parent else ""
            reply = self._bound_reply(rule.reply, rollout) if rule.reply else None
            return Open(rollout, reply or self._call(request, rule, fields, rollout), parent, self._minted(rollout))
        return self._call(request, rule, fields, rollout)

    def task(self, request: Request) -> str:
        """Return the task that a request names, or an empty text for the URL's. Raises RefusalError (400)."""
        name = _Fields(request).value(self._rules.task) if self._rules.task else ""
        return named("task", name) if name else ""

    def _rule(self, request: Request, fields: "_Fields") -> tuple[Rule, Mapping[str, str]]:
        # The path is decoded first, so that no spelling of it evades its rule.
        path = unquote(request.path)
        for route in self._routes:
            if request.method in route.methods or "*" in route.methods:
                match = route.path.fullmatch(path)
                if match is not None and all(member(fields.json, at) == want for at, want in route.rule.when.items()):
                    return route.rule, match.groupdict()
        return _PLAIN, {}

    def _rollout(self, request: Request, rule: Rule, fields: "_Fields") -> str:
        if rule.rollout == "fresh":
            return request.fresh
        if request.rollout:
            return request.rollout
        source = rule.rollout or self._rules.rollout
        name = fields.value(source) if source else ""
        if name:
            return _name(name)
        if rule.do == "open" and self._rules.mint:
            return request.fresh
        where = f"in its {source.replace(':', ' ')}" if source else "in the URL: /t/{task}/r/{rollout}/{endpoint}/…"
        raise RefusalError(400, "no-rollout", f"the request names no rollout. Put its name {where}.")

    def _minted(self, rollout: str) -> Headers:
        if not self._rules.mint:
            return ()
        return (("set-cookie", f"{self._rules.mint}={rollout}; Path=/; HttpOnly; SameSite=Lax"),)

    def _call(self, request: Request, rule: Rule, fields: "_Fields", rollout: str) -> Call:
        body, bound = self._unbound(request.body, fields, rollout)
        body, aliases = _aliased(body, rule, fields)
        headers = self._forwarded(request)
        self._refuse_escapes(request.path)
        try:
            request_head(request.method, request.target, headers, self._upstream, len(body))
        except InvalidRequestError as error:
            raise RefusalError(400, "request", f"the request cannot be sent to a tool server: {error}.") from None
        arguments: dict[str, Any] = {
            "method": request.method, "target": request.target, "headers": [list(header) for header in headers],
        }  # fmt: skip
        arguments |= {"effect": rule.effect} if rule.effect else {}
        arguments |= {"cache": "never"} if rule.cache == "never" else {}
        arguments |= self._outsider(rule) if self._outside else {}
        arguments |= {"answers": rule.answers} if request.method == "WS" else {}
        tool, values = _tool(rule, request, fields)
        identity = {"args": self._args(request, rule, body), "headers": self._in_key(headers)}
        # Several values may make the same name in different ways: `a b` and `c` the one of `a` and `b c`.
        identity |= {"fields": values} if len(values) > 1 else {}
        return Call(
            ToolCall(self._endpoint, tool, arguments, body),
            call_key(ToolCall(self._endpoint, tool, identity)),
            rollout=rollout,
            request_id=request.header(self._rules.request_id) if self._rules.request_id else "",
            commutes=rule.commutes,
            bound=bound,
            streams=not bound,
            constant=rule.stateless,
            aliases=aliases,
            routed=bool(self._rules.task),
        )

    def _outsider(self, rule: Rule) -> dict[str, Any]:
        """Return more arguments for a call to a server elsewhere: its driver needs to know the sessions there."""
        arguments: dict[str, Any] = {"stateless": True} if rule.stateless else {}
        arguments |= {"session": "opens" if rule.do == "open" else "within"} if self._opens else {}
        arguments |= {"names": rule.names} if rule.names else {}
        return arguments | ({"bind": list(self._rules.bind)} if self._rules.bind else {})

    def _refuse_escapes(self, path: str) -> None:
        """Raise RefusalError (400) for a path that a server could resolve to one outside its prefix."""
        segments = re.split(r"[/\\]", unquote(path)) if self._prefix else ()
        if any(segment.partition(";")[0] in (".", "..") for segment in segments):
            raise RefusalError(
                400,
                "request",
                "a path with . or .. segments may leave the path of its upstream. Send the resolved path.",
            )

    def _unbound(self, body: bytes, fields: "_Fields", rollout: str) -> tuple[bytes, bool]:
        """Return a body with `OUR_NAME` for the rollout's name, and whether responses need the opposite."""
        if not self._rules.bind:
            return body, False
        value = fields.json
        if isinstance(value, dict) and any(isinstance(member(value, at), str) for at in self._rules.bind):
            try:
                body = orjson.dumps(renamed(value, self._rules.bind, rollout, OUR_NAME))
            except orjson.JSONEncodeError as error:
                # What is read may be nested more deeply than what can be written.
                raise RefusalError(400, "json", f"the body cannot go to the server: {error}.") from None
        return body, True

    def _forwarded(self, request: Request) -> Headers:
        """Return the headers for the server: with its address in place of the proxy's, and without its tokens."""
        ours = "{0.scheme}://{0.netloc}".format(urlsplit(request.base))
        kept = []
        for name, value in request.headers:
            if name in _IDENTITY or (name in ("authorization", "x-api-key") and ROLLOUT_TOKEN.search(value)):
                continue
            if name == "accept-encoding" and self._rules.bind:
                # The names of sessions are in the body, which is read and written again.
                continue
            if name in _ADDRESSES and value.startswith(ours):
                below = value.removeprefix(request.base)
                path = below.removeprefix(ours) if below == value else self._prefix + below
                value = self._origins[0] + (path if name != "origin" else "")  # noqa: PLW2901
            kept.append((name, value))
        return tuple(kept)

    def _args(self, request: Request, rule: Rule, body: bytes) -> dict[str, Any]:
        # U+FFFD stands for many bytes, and some servers tell an escaped slash from a slash, so the call's name alone
        # would not tell such paths apart. The answer to HEAD has no body, and would leave a client of GET waiting.
        is_plain = "\ufffd" not in unquote(request.path) and "%2f" not in request.path.lower()
        named = rule.tool and is_plain and request.method != "HEAD"
        args: dict[str, Any] = {} if named else {"target": request.path}
        if "query" in rule.args:
            args["query"] = query_form(request.query)
        if "body" in rule.args:
            form = body_form(body, request.header("content-type"), archives=rule.archives)
            if form is not None and isinstance(form.get("json"), dict):
                form |= _chosen(form["json"], rule)
            args["body"] = form
        return args

    def _in_key(self, headers: Headers) -> list[list[str]]:
        wanted = self._rules.headers
        rows = [
            [
                name,
                media_type(value) if name == "content-type" and media_type(value) == "multipart/form-data" else value,
            ]
            for name, value in headers
            if (name in wanted if wanted is not None else name not in NOISE)
        ]
        return sorted(rows, key=lambda header: header[0])

    # -- answers -----------------------------------------------------------------------------------------------------

    @override
    def answer(self, response: Response, request: Request) -> Response:
        headers = tuple((name, self._client_address(name.lower(), value, request)) for name, value in response.headers)
        if self._rules.bind and response.body:
            value = json_value(response.body)
            if value is not None and isinstance(value[0], dict):
                meaning = self.read(request)
                client_name = "" if isinstance(meaning, Local) else meaning.rollout
                body = orjson.dumps(renamed(value[0], self._rules.bind, OUR_NAME, client_name))
                length = str(len(body))
                headers = tuple((n, length if n.lower() == "content-length" else v) for n, v in headers)
                return Response(response.status, headers, body)
        return replace(response, headers=headers)

    def _client_address(self, name: str, value: str, request: Request) -> str:
        """Return a header's value with the client's address of the endpoint in place of the server's own."""
        if name in ("location", "content-location"):
            for start in (*(origin + self._prefix for origin in self._origins), self._prefix):
                below = value.removeprefix(start)
                if value.startswith(start) and (below.startswith("/") or (below == "" and start)):
                    # `//host/path` is the URL of another host.
                    return value if below.startswith("//") and not start else request.base + below
            return self._origins[0] + value if value.startswith("/") and not value.startswith("//") else value
        if name == "set-cookie":
            # The cookie belongs to the endpoint's path at the proxy, and the proxy's host is the only domain.
            prefix = urlsplit(request.base).path
            value = re.sub(rf"(;\s*path\s*=\s*){re.escape(self._prefix)}(?=/|;|$)", r"\1", value, flags=re.IGNORECASE)
            value = re.sub(r"(;\s*path\s*=\s*)(?=;|$)", r"\1/", value, flags=re.IGNORECASE)
            value = re.sub(r";\s*domain\s*(=[^;]*)?(?=;|$)", "", value, flags=re.IGNORECASE)
            return re.sub(r"(;\s*path\s*=\s*)/", lambda match: f"{match[1]}{prefix}/", value, flags=re.IGNORECASE)
        return value

    def _bound_reply(self, reply: RuleReply, rollout: str) -> Local:
        local = _local(reply)
        return replace(local, body=local.body.replace(b"{rollout}", rollout.encode()))

    @override
    def problem(self, problem: Problem, request: Request) -> Local | None:
        if self._rules.retry_status is None or not (problem.infrastructure or problem.slug == "overloaded"):
            return None
        headers = tuple((name.decode(), value.decode()) for name, value in problem.headers())
        return Local(self._rules.retry_status, problem.body(), headers)

    def trouble(self, problem: Problem) -> str | None:
        """Return the WebSocket message that reports a problem; None if the connection is closed instead."""
        form = self._rules.trouble
        if form is None:
            return None
        return orjson.dumps(_filled(form, {"{slug}": problem.slug, "{detail}": problem.detail})).decode()


class _Fields:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._json: tuple[Any] | None = None
        self.captures: Mapping[str, str] = {}

    @property
    def json(self) -> Any:
        if self._json is None:
            self._json = (_members(self._request),)
        return self._json[0]

    def value(self, source: str) -> str:
        """Return the value of a source such as `header:x`; empty for none."""
        kind, _, name = source.partition(":")
        match kind:
            case "header":
                return self._request.header(name.lower())
            case "cookie":
                return _cookie(self._request.header("cookie"), name)
            case "query":
                return dict(parse_qsl(self._request.query)).get(name, "")
            case "path":
                return self.captures.get(name, "")
        value = member(self.json, name)
        if isinstance(value, orjson.Fragment):
            # A number with more digits than Python's has no `str`.
            return orjson.dumps(value).decode()
        return value if isinstance(value, str) else "" if value is None else str(value)


_PLAIN = Rule(on="* /")


def _origins_of(server: Server | Upstream) -> tuple[tuple[str, ...], str]:
    """Return the origins by which a server may name itself, and the prefix of all its paths."""
    if isinstance(server, Server):
        return (f"http://127.0.0.1:{server.port}", f"http://localhost:{server.port}"), ""
    url = urlsplit(server.upstream)
    return (f"{url.scheme}://{url.netloc}",), url.path.rstrip("/")


def _members(request: Request) -> Any:
    form = body_form(request.body, request.header("content-type") or "application/json")
    if form is None or "json" in form:
        return None if form is None else form["json"]
    if "parts" in form:
        return {part["name"]: part["text"] for part in form["parts"] if "text" in part}
    return dict(parse_qsl(request.body.decode(), keep_blank_values=True)) if "form" in form else {}


def _cookie(header: str, name: str) -> str:
    try:
        cookie = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if cookie is None else cookie.value


def _route(rule: Rule) -> _Route:
    methods, _, path = rule.on.partition(" ")
    pattern = ""
    for piece in re.split(r"(\{[A-Za-z_]+(?:\.\.\.)?\}|\*)", path):
        if piece == "*":
            pattern += "[^/]*"
        elif piece.startswith("{"):
            name = piece.strip("{.}")
            pattern += f"(?P<{name}>.*)" if piece.endswith("...}") else f"(?P<{name}>[^/]+)"
        else:
            pattern += re.escape(piece)
    return _Route(frozenset(methods.split("|")), path_pattern(pattern, ambiguous=_is_ambiguous(path)), rule)


def _is_ambiguous(path: str) -> bool:
    """Return whether a path can match in several ways: two wildcards in a segment, or something after `{name...}`."""
    segments = [re.findall(r"\{[A-Za-z_]+(?:\.\.\.)?\}|\*", segment) for segment in path.split("/")]
    wildcards = [wildcard for segment in segments for wildcard in segment]
    return any(len(segment) > 1 for segment in segments) or any("..." in wildcard for wildcard in wildcards[:-1])


def _tool(rule: Rule, request: Request, fields: _Fields) -> tuple[str, list[str]]:
    """Return the name of a call, and the values in it."""
    if not rule.tool:
        return f"{request.method} {unquote(request.path)}", []
    pieces = re.split(r"\{([^{}]+)\}", rule.tool)
    # Every second piece is the name of a field.
    values = [fields.captures.get(name) or fields.value(f"body:{name}") for name in pieces[1::2]]
    pieces[1::2] = values
    return "".join(pieces), values


def _local(reply: RuleReply) -> Local:
    headers = tuple((name.lower(), value) for name, value in reply.headers.items())
    if isinstance(reply.body, str):
        return Local(reply.status, reply.body.encode(), headers or (("content-type", "text/plain"),))
    body = b"" if reply.body is None else orjson.dumps(reply.body)
    return Local(reply.status, body, headers or (("content-type", "application/json"),))


def _name(text: str) -> str:
    return named("rollout", text)


def _aliased(body: bytes, rule: Rule, fields: _Fields) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    chosen = {path: member(fields.json, path) for path in rule.alias}
    aliases = tuple((name, f"forkpoint-{path}") for path, name in chosen.items() if isinstance(name, str) and name)
    if not aliases:
        return body, ()
    value = orjson.loads(body)
    for (path, name), (_, ours) in zip(((p, n) for p, n in chosen.items() if n), aliases, strict=True):
        value = renamed(value, (path,), name, ours, whole=True)
    return orjson.dumps(value), aliases


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(inner, values) for name, inner in value.items()}
    return values.get(value, value) if isinstance(value, str) else value


def _chosen(value: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """Return the fields of a body that are in the key."""
    if rule.pick:
        chosen = {path: member(value, path) for path in rule.pick}
        # A default stands for a field that is not there, and mostly not for null.
        missing = [path for path in rule.pick if chosen[path] is None and without(value, path.split(".")) == value]
        return {"json": chosen} | ({"missing": missing} if None in chosen.values() else {})
    for path in rule.drop:
        value = without(value, path.split("."))
    return {"json": value}
