"""Rule-based dialects: what requests mean, and the form of each client's responses."""

from typing import Any

import pytest

from proxy.dialects.base import Call, Close, Local, Open, Request, Response
from proxy.dialects.rule_based import Declared
from proxy.dialects.rule_schema import RulesError, identity, rules_of
from proxy.refusals import Problem, RefusalError
from sandboxes.server_spec import Server
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients.json_paths import OUR_NAME

JSON = (("content-type", "application/json"),)


def dialect(name: str = "http", *rules: dict[str, Any]) -> Declared:
    server = Server(command="x", port=9000, dialect=name, rules=rules)
    return Declared("api", server, rules_of(server))


def request(method: str, target: str, body: str = "", *, rollout: str = "r", headers: Any = JSON) -> Request:
    base = f"http://proxy:8700/t/task/r/{rollout}/api"
    return Request(method, target, tuple(headers), body.encode(), rollout, base, "fresh-name")


def call(meaning: object) -> Call:
    assert isinstance(meaning, Call)
    return meaning


def test_first_fitting_rule_counts() -> None:
    rules = (
        {"on": "POST /run/{tool}", "if": {"mode": "fast"}, "tool": "fast {tool}"},
        {"on": "POST|PUT /run/{tool}", "tool": "{tool}"},
    )
    read = dialect("http", *rules).read
    assert call(read(request("POST", "/run/x", '{"mode": "fast"}'))).call.tool == "fast x"
    assert call(read(request("PUT", "/run/x", "{}"))).call.tool == "x"
    assert call(read(request("PATCH", "/run/x", "{}"))).call.tool == "PATCH /run/x"


def test_spelling_of_a_path_cannot_evade_its_rule() -> None:
    read = dialect("http", {"on": "GET /reset", "effect": "change"}).read
    for target in ("/reset", "/r%65set", "/%72eset?x=1"):
        assert call(read(request("GET", target))).call.arguments["effect"] == "change"


def test_boundary_is_in_the_key_of_an_unread_form() -> None:
    """A form that a boundary divides well has the key of its parts. In any other body the boundary says what it is."""

    def key(kind: str, body: str) -> bytes:
        headers = (("content-type", kind),)
        return call(dialect("http").read(request("POST", "/run", body, headers=headers))).key

    whole = '--{0}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--{0}--'
    a, b = ("multipart/form-data; boundary=a", "multipart/form-data; boundary=b")
    assert key(a, whole.format("a")) == key(b, whole.format("b"))
    for body in ("--a--b--", whole.format("a") + whole.format("b"), whole.format("c")):
        assert key(a, body) != key(b, body), body
    assert key("multipart/mixed; boundary=a", "--a--b--") != key("multipart/mixed; boundary=b", "--a--b--")


@pytest.mark.parametrize(
    ("rule", "one", "other"),
    [
        ({"on": "GET|HEAD /f/{p...}", "tool": "f {p}"}, ("GET", "/f/a"), ("HEAD", "/f/a")),
        ({"on": "GET /f/{p...}", "tool": "f {p}"}, ("GET", "/f/a%2fb"), ("GET", "/f/a/b")),
        ({"on": "GET /f/{p}/{q}", "tool": "{p} {q}"}, ("GET", "/f/a%20b/c"), ("GET", "/f/a/b%20c")),
        ({"on": "POST /f", "tool": "f", "pick": ["n.m"]}, ("POST", "/f", '{"n":{"m":null}}'), ("POST", "/f", "{}")),
        ({"on": "POST /f", "tool": "f", "pick": ["n"]}, ("POST", "/f", '{"n":null}'), ("POST", "/f", '{"m":1}')),
    ],
)
def test_requests_that_a_server_tells_apart_have_two_keys(
    rule: dict[str, Any], one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    """A call's name, and the fields that are picked, hide nothing that a server answers differently."""
    read = dialect("http", rule).read
    assert call(read(request(*one))).key != call(read(request(*other))).key


def test_numbers_beside_long_ones_count() -> None:
    """A long number anywhere in a body changes neither its rule nor its rollout."""
    long = '"s": "1234567890123456"'
    assert (
        call(dialect("tvcache").read(request("POST", "/execute", f'{{"sandbox_id": 7, {long}}}', rollout=""))).rollout
        == "7"
    )
    read = dialect("http", {"on": "POST /run", "if": {"n": 1}, "tool": "one {m}"}).read
    for number in ("5", "123456789012345678901"):
        assert call(read(request("POST", "/run", f'{{"n": 1, "m": {number}, {long}}}'))).call.tool == f"one {number}"


@pytest.mark.parametrize(("name", "counts"), [("x-request-id", False), ("idempotency-key", True)])
def test_a_retry_is_not_a_new_request(name: str, *, counts: bool) -> None:
    """A server orders once for one idempotency key, so a request with another key has another answer."""
    keys = {call(dialect("http").read(request("POST", "/orders", headers=((name, one),)))).key for one in ("a", "b")}
    assert (len(keys) > 1) is counts


def test_only_tokens_of_the_proxy_stay_here() -> None:
    """A key of another service may have the same letters in its middle."""
    own, other = f"Bearer fp_{'A' * 32}", f"Bearer eyJh.eyJz.Qfp_{'A' * 32}"

    def sent(value: str) -> Any:
        return call(dialect().read(request("GET", "/", headers=(("authorization", value),)))).call.arguments["headers"]

    assert sent(own) == []
    assert sent(other) == [["authorization", other]]


def test_dropped_fields_are_not_in_the_key() -> None:
    def key(rule: dict[str, Any], body: str) -> bytes:
        return call(dialect("http", {"on": "POST /run", **rule}).read(request("POST", "/run", body))).key

    assert key({"drop": ["id", "meta.time"]}, '{"id": 1, "a": 2, "meta": {"time": 3}}') == key(
        {"drop": ["id", "meta.time"]}, '{"id": 9, "a": 2, "meta": {"time": 8}}'
    )
    assert key({"drop": ["id"]}, '{"id": 1, "a": 2}') != key({"drop": ["id"]}, '{"id": 1, "a": 3}')
    assert key({"pick": ["a"]}, '{"a": 2, "b": 1}') == key({"pick": ["a"]}, '{"a": 2, "b": 7}')
    assert key({"args": "query"}, '{"a": 2}') == key({"args": "query"}, '{"a": 3}')
    assert key({}, '{"a": 2}') != key({}, '{"a": 3}')


def test_health_reply_needs_no_rollout() -> None:
    meaning = dialect("swe-rex").read(request("GET", "/is_alive", rollout=""))
    assert meaning == Local(200, b'{"is_alive":true,"message":""}')


@pytest.mark.parametrize(
    ("source", "sent"),
    [
        ("header:X-Session", {"headers": (("x-session", "s1"),)}),
        ("cookie:sid", {"headers": (("cookie", "a=b; sid=s1"),)}),
        ("query:sid", {"target": "/run?sid=s1"}),
        ("body:session.id", {"body": '{"session": {"id": "s1"}}'}),
    ],
)
def test_rule_says_where_the_rollout_is_named(source: str, sent: dict[str, Any]) -> None:
    read = dialect("http", {"on": "POST /run", "rollout": source}).read
    client_request = {"target": "/run", "body": "", "headers": JSON, **sent}
    assert call(
        read(
            request(
                "POST", client_request["target"], client_request["body"], rollout="", headers=client_request["headers"]
            )
        )
    ).rollout == ("s1")
    with pytest.raises(RefusalError, match="names no rollout"):
        read(request("POST", "/run", rollout=""))


def test_malformed_rollout_name_is_refused() -> None:
    read = dialect("http", {"on": "POST /run", "rollout": "body:id"}).read
    with pytest.raises(RefusalError, match="is not a name of a rollout"):
        read(request("POST", "/run", '{"id": "../other"}', rollout=""))


def test_tvcache_protocol_opens_runs_forks_and_closes() -> None:
    wire = dialect("tvcache")
    began = wire.read(request("POST", "/start", '{"sandbox_id": "t_1"}', rollout=""))
    assert isinstance(began, Open)
    assert (began.rollout, call(began.then).call.body) == ("t_1", b'{"sandbox_id":"forkpoint-rollout"}')
    one, other = (
        call(
            wire.read(
                request("POST", "/execute", f'{{"sandbox_id": "{s}", "command": "c", "argument": "a"}}', rollout="")
            )
        )
        for s in ("t_1", "t_2")
    )
    assert (one.rollout, one.call.tool, one.key) == ("t_1", "c", other.key)
    forked = wire.read(request("POST", "/fork", '{"sandbox_id": "t_1"}', rollout=""))
    assert isinstance(forked, Open)
    assert (forked.rollout, forked.parent) == ("fresh-name", "t_1")
    assert isinstance(forked.then, Local)
    assert b"fresh-name" in forked.then.body
    ended = wire.read(request("POST", "/stop", '{"sandbox_id": "t_1"}', rollout=""))
    assert isinstance(ended, Close)
    assert ended.rollout == "t_1"


def test_recorded_response_names_each_clients_rollout() -> None:
    wire = dialect("tvcache")
    body = f'{{"sandbox_id":"{OUR_NAME}","sandbox_path":"/tmp/{OUR_NAME}/x","other":"{OUR_NAME}"}}'.encode()
    client_request = request("POST", "/start", '{"sandbox_id": "t_7"}', rollout="")
    response = wire.answer(Response(200, (("Content-Length", str(len(body))),), body), client_request)
    assert response.body == f'{{"sandbox_id":"t_7","sandbox_path":"/tmp/t_7/x","other":"{OUR_NAME}"}}'.encode()
    assert response.headers == (("Content-Length", str(len(response.body))),)


def test_session_cookie_is_minted_for_a_new_rollout() -> None:
    wire = dialect("nemo-gym")
    began = wire.read(request("POST", "/seed_session", "{}", rollout=""))
    assert isinstance(began, Open)
    assert began.headers[0][1].startswith("forkpoint_rollout=fresh-name;")
    cookie = (("cookie", "session=x; forkpoint_rollout=fresh-name"),)
    assert call(wire.read(request("POST", "/add", "{}", rollout="", headers=cookie))).rollout == "fresh-name"


def test_infrastructure_problem_has_the_retry_status() -> None:
    trouble = Problem(503, "sandbox", "t", "d", retry_after_s=1, infrastructure=True)
    client_request = request("POST", "/run_code", "{}")
    response = dialect("sandbox-fusion").problem(trouble, client_request)
    assert response is not None
    assert response.status == 504
    assert dialect("sandbox-fusion").problem(Problem(422, "spec", "t", "d"), client_request) is None
    assert dialect("http").problem(trouble, client_request) is None


@pytest.mark.parametrize("rule", [{"on": "x"}, {"on": "GET /x", "do": "health"}, {"on": "GET /x", "no": "such"}])
def test_malformed_rules_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(RulesError):
        dialect("http", rule)


def test_changing_a_rule_changes_the_tree() -> None:
    def key(**more: Any) -> str:
        return identity(EnvironmentSpec(servers={"api": Server(command="x", port=1, **more)}))

    assert len({key(), key(dialect="swe-rex"), key(rules=({"on": "GET /x", "effect": "change"},))}) == 3
    assert identity(EnvironmentSpec()) == ""


@pytest.mark.parametrize("path", ["/" + "*a" * 20, "/{a...}/x/{b...}/x/{c...}/x/{d...}/x", "/{a}b{c}b{d}b{e}b{f}b{g}"])
def test_no_path_makes_a_rule_slow(path: str) -> None:
    """The path is the agent's and the rule its task's: together they would hold the event loop for years."""
    meaning = dialect("http", {"on": f"POST {path}", "tool": "t"}).read(
        request("POST", "/" + "a" * 5000 + "/x" * 5000 + "/")
    )
    assert call(meaning).call.tool != "t"


def test_ambiguous_paths_match_as_others_do() -> None:
    read = dialect("http", {"on": "POST /v*/run-*/{tool...}/{last}", "tool": "{tool} {last}"}).read
    assert call(read(request("POST", "/v1/run-x/a/b%63/d"))).call.tool == "a/bc d"
