"""A rollout's token reaches that rollout alone, on every route; and no token of the proxy reaches a tool server."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import SecretStr
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from proxy.control_app import control_application
from sandboxes.upstream.driver import HttpDriver
from tests.proxy.serving import Running, serving
from tests.sandboxes.box import local_driver

if TYPE_CHECKING:
    from sandboxes.driver import Driver

ROOT, ALICE = "root-token-0123456789", "alice-token-012345678"
TASK, UP = "alice-box", "alice-up"
SHELL = {"command": "cat /root/f; pwd"}
SECRET = "written by the other rollout"


OURS = {
    "X-Forkpoint-Node": "n99", "Cache-Status": "forkpoint; hit", "Server-Timing": "tool;dur=99",
    "Access-Control-Allow-Origin": "*", "Alt-Svc": 'h3="evil:443"', "Connection": "x-hop", "X-Hop": "1",
}  # fmt: skip
"""Headers with which the server pretends to be the proxy."""


class Echo(BaseHTTPRequestHandler):
    """Answers with the request as it came."""

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        headers = [[name, value] for name, value in self.headers.items()]
        content = json.dumps({"path": self.path, "headers": headers, "body": body}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        for name, value in OURS.items():
            self.send_header(name, value)
        self.send_header("set-cookie", "sid=1; Path = /; Domain = evil.example")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = respond  # noqa: N815 - names of the library

    def log_message(self, *_: object) -> None: ...


@contextmanager
def echoing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spec_of(upstream: str) -> dict[str, Any]:
    rules = [
        {"on": "POST /fork", "do": "open", "parent": "body:from", "rollout": "fresh", "reply": {"body": {"ok": 1}}},
        {"on": "POST /join", "do": "open", "parent": "body:from", "reply": {"body": {"ok": 1}}},
        {"on": "POST /end", "do": "close", "rollout": "body:id", "reply": {"body": {}}},
        {"on": "POST /by-body", "rollout": "body:id", "stateless": True},
        {"on": "POST /x", "stateless": True},
    ]
    servers = {"api": {"upstream": upstream, "rules": rules}, "plain": {"upstream": upstream, "mode": "pass"}}
    return {"driver": "http", "servers": servers | {"routed": {"upstream": upstream, "task": "body:task"}}}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    file = data.with_name("tokens-of-rollouts")
    file.write_text(f"{ALICE} alice-*\n")
    drivers: dict[str, Driver] = {
        "local": local_driver(data / "local", checkpoints=False),
        "http": HttpDriver(data / "http"),
    }
    with echoing() as url, serving(data, drivers=drivers, token=SecretStr(ROOT), token_file=file) as running:
        for task, spec in ((TASK, {"driver": "local"}), (UP, spec_of(url))):
            respond(running, "PUT", f"/api/v1/tasks/{task}", ROOT, json=spec).raise_for_status()
        write = {"command": f"echo {SECRET} > /root/f"}
        for task in (TASK, UP):
            respond(running, "POST", f"/api/v1/tasks/{task}/rollouts", ROOT, json={"rollout": "mine-2"})
            respond(running, "POST", f"/api/v1/tasks/{task}/rollouts", ROOT, json={"rollout": "other"})
        respond(running, "POST", f"/t/{TASK}/r/other/shell/exec", ROOT, json=write).raise_for_status()
        yield running


@pytest.fixture(scope="module")
def tokens(proxy: Running) -> dict[str, str]:
    """The tokens of the rollout `mine` of each task."""
    begun = {
        task: respond(proxy, "POST", f"/api/v1/tasks/{task}/rollouts", ROOT, json={"rollout": "mine"}).json()
        for task in (TASK, UP)
    }
    return {task: view["token"] for task, view in begun.items()}


def respond(proxy: Running, method: str, path: str, token: str, **more: Any) -> httpx.Response:
    return proxy.client.request(method, path, headers={**forms(token)[0], **more.pop("headers", {})}, **more)


def forms(token: str) -> list[dict[str, str]]:
    return [{"authorization": f"Bearer {token}"}, {"x-api-key": token}, {"x-forkpoint-token": token}]


def others(proxy: Running) -> Any:
    """Return what must not change: all rollouts but `mine` and those of stateless calls, with their calls."""
    views = []
    for task in (TASK, UP):
        listed = respond(proxy, "GET", f"/api/v1/tasks/{task}/rollouts", ROOT).json()["items"]
        names = sorted(view["rollout"] for view in listed if view["rollout"] != "mine" and view["rollout"][0] != "~")
        views += [respond(proxy, "GET", f"/api/v1/tasks/{task}/rollouts/{name}", ROOT).json() for name in names]
    return views


def routes(proxy: Running) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route of the application, with the other rollout's names in them."""
    values = {"task": TASK, "rollout": "other", "node": "n1", "path": "index.html"}
    pending: list[Any] = list(control_application(proxy.control, proxy.engine).routes)
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute) or hasattr(route, "path"):
            path = re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: values.get(match[1], "1"), route.path)
            for method in sorted(getattr(route, "methods", None) or {"WEBSOCKET"}):
                yield method, path
        pending += getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", [])


def test_every_route_of_the_control_plane_refuses_it(proxy: Running, tokens: dict[str, str]) -> None:
    """The token is for agents; the pages and the API need another one."""
    before, known = others(proxy), sorted(set(routes(proxy)))
    assert len(known) > 50, known
    for method, path in known:
        if path in {"/", "/ui", "/manual", "/healthz", "/readyz"} or path.startswith(("/ui/", "/manual/")):
            continue
        for headers in forms(tokens[TASK]):
            if method == "WEBSOCKET":
                url = f"ws://{proxy.address[0]}:{proxy.address[1]}{path}"
                with pytest.raises(InvalidStatus) as refused, connect(url, additional_headers=headers):
                    pass
                assert refused.value.response.status_code == 401, path
            else:
                assert proxy.client.request(method, path, headers=headers, json={}).status_code == 401, (method, path)
    assert others(proxy) == before


def test_no_route_shows_the_tasks_of_other_tokens(proxy: Running) -> None:
    """Alice's token names a task of somebody else on every route, and asks for every view of all tasks."""
    foreign = "bob-box"
    respond(proxy, "PUT", f"/api/v1/tasks/{foreign}", ROOT, json={"driver": "local"}).raise_for_status()
    write = {"command": f"echo {SECRET}"}
    respond(proxy, "POST", f"/t/{foreign}/r/other/shell/exec", ROOT, json=write).raise_for_status()
    before = respond(proxy, "GET", f"/api/v1/tasks/{foreign}/rollouts/other", ROOT).json()
    for method, known in sorted(set(routes(proxy))):
        path = known.replace(TASK, foreign)
        if method == "WEBSOCKET" or path.startswith(("/ui", "/manual")):
            continue
        for query in ("", f"?task={foreign}", f"?q={foreign}", f"?run={foreign}", "?limit=1000"):
            answer = respond(proxy, method, f"{path}{query}", ALICE, json={"spec": {"driver": "local"}})
            if foreign in path:
                assert answer.status_code == 403, (method, path, answer.text)
            shown = answer.text.replace(f"{path}{query}", "")
            assert SECRET not in shown, (method, path)
            assert foreign not in shown or answer.status_code >= 400, (method, path, query, answer.text)
    assert respond(proxy, "GET", f"/api/v1/tasks/{foreign}/rollouts/other", ROOT).json() == before


def agents_requests(base: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield requests for agents' endpoints below a base URL: method, path, and more."""
    yield "POST", f"{base}/shell/exec", {"json": SHELL}
    yield "GET", f"{base}/shell/file?path=/root/f", {}
    yield "POST", f"{base}/mcp", {"json": {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}}
    yield "DELETE", f"{base}/mcp", {"headers": {"mcp-session-id": "other"}}
    known = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "exec", "arguments": SHELL}}
    yield "POST", f"{base}/mcp", {"json": known, "headers": {"mcp-session-id": "other"}}
    for method, path in (
        ("GET", "containers/json?all=1"), ("GET", "info"), ("POST", "containers/create"), ("POST", "containers/prune"),
        ("GET", "containers/other/json"), ("DELETE", "containers/other"), ("GET", "containers/other/logs?stdout=1"),
        ("POST", "containers/other/exec"), ("GET", "containers/other/archive?path=/root/f"), ("GET", "version"),
    ):  # fmt: skip
        yield method, f"{base}/docker/{path}", {"json": {"Image": "x"}} if method == "POST" else {}
    for method, path in (
        ("GET", "sandboxes"), ("GET", "v2/sandboxes"), ("POST", "sandboxes"), ("DELETE", "sandboxes/other"),
        ("GET", "sandboxes/other"), ("POST", "sandboxes/other/connect"), ("POST", "sandboxes/other/pause"),
        ("POST", "sandboxes/other/timeout"), ("POST", "sandboxes/other/snapshots"), ("POST", "sandboxes/other/fork"),
        ("GET", "snapshots"), ("DELETE", "templates/n1"), ("GET", "sandboxes/other/logs"),
    ):  # fmt: skip
        yield method, f"{base}/e2b/{path}", {"json": {"timeout": 60}} if method == "POST" else {}
    for named in ({"e2b-sandbox-id": "other"}, {"host": "49983-other.e2b.localhost"}):
        yield "GET", f"{base}/e2b/files?path=/root/f&username=root", {"headers": named}
        yield "GET", f"{base}/e2b/envs", {"headers": named}
        yield "POST", f"{base}/e2b/process.Process/List", {"headers": named, "json": {}}
        yield "POST", f"{base}/e2b/filesystem.Filesystem/ListDir", {"headers": named, "json": {"path": "/root"}}


@pytest.mark.parametrize(
    "base", [f"/t/{TASK}", f"/t/{TASK}/r/other", f"/t/{TASK}/r/mine-2", f"/ng-rollout/{TASK}-other", "/e", "/e "]
)
def test_every_agents_address_of_others_refuses_it(proxy: Running, tokens: dict[str, str], base: str) -> None:
    """Addresses that name another rollout or none: in the path, in headers, or in the endpoint's own protocol."""
    before = others(proxy)
    names = {"x-forkpoint-task": TASK} | ({} if base == "/e " else {"x-forkpoint-rollout": "other"})
    for method, path, more in agents_requests(base.strip()):
        for headers in forms(tokens[TASK]):
            sent = {**headers, **(names if base.startswith("/e") else {}), **more.get("headers", {})}
            answer = proxy.client.request(method, path, **{**more, "headers": sent})
            assert answer.status_code == 401, (method, path, answer.text)
            assert SECRET not in answer.text
    assert others(proxy) == before


def test_own_address_reaches_no_other_rollout(proxy: Running, tokens: dict[str, str]) -> None:
    """The path names the token's rollout, and the endpoint's own protocol another one."""
    before = others(proxy)
    own = {"x-forkpoint-task": TASK, "x-forkpoint-rollout": "mine"}
    for base, names in ((f"/t/{TASK}/r/mine", {}), ("/e", own), ("/e", {})):
        for method, path, more in agents_requests(base):
            sent = {**forms(tokens[TASK])[1], **names, **more.get("headers", {})}
            answer = proxy.client.request(method, path, **{**more, "headers": sent})
            assert answer.status_code < 500, (method, path, answer.text)
            assert SECRET not in answer.text, (method, path)
            assert "other" not in answer.text or answer.status_code in (400, 403, 404, 502), (method, path, answer.text)
            if path.endswith("/e2b/sandboxes") and method == "GET":
                assert [entry["sandboxID"] for entry in answer.json()] == ["mine"]
    assert others(proxy) == before


def test_further_containers_below_its_url_are_other_rollouts(proxy: Running) -> None:
    """Another token may create several containers below one URL. The first is the URL's rollout."""
    begun = respond(proxy, "POST", f"/api/v1/tasks/{TASK}/rollouts", ROOT, json={"rollout": "two"}).json()
    base, ours = f"/t/{TASK}/r/two/docker/containers", begun["token"]
    create = {"Image": "any", "Cmd": ["sleep", "2h"]}
    made = [respond(proxy, "POST", f"{base}/create", ROOT, json=create).json()["Id"] for _ in range(2)]
    execs = []
    for container in made:
        respond(proxy, "POST", f"{base}/{container}/start", ROOT)
        execs.append(respond(proxy, "POST", f"{base}/{container}/exec", ROOT, json={"Cmd": ["pwd"]}).json()["Id"])
    assert [entry["Id"] for entry in respond(proxy, "GET", f"{base}/json", ours).json()] == made[:1]
    for place, refused in ((1, True), (0, False)):
        for method, path in (
            ("GET", f"{base}/{made[place]}/json"), ("POST", f"{base}/{made[place]}/exec"),
            ("GET", f"{base}/{made[place]}/archive?path=/etc"), ("POST", f"{base}/{made[place]}/stop"),
            ("POST", f"/t/{TASK}/r/two/docker/exec/{execs[place]}/start"), ("DELETE", f"{base}/{made[place]}"),
        ):  # fmt: skip
            answer = respond(proxy, method, path, ours, json={"Cmd": ["pwd"], "Detach": "start" in path})
            assert (answer.status_code == 404) is refused, (path, answer.text)


def test_bodies_name_no_other_rollout(proxy: Running, tokens: dict[str, str]) -> None:
    """Rules read a rollout, its parent or a task from the body: none may be another one."""
    before = others(proxy)
    for path, body, status in (
        ("api/join", {"from": "other"}, 403), ("api/fork", {"from": "other"}, 403), ("api/fork", {"from": "mine"}, 403),
        ("api/end", {"id": "other"}, 200), ("api/by-body", {"id": "other"}, 200), ("routed/x", {"task": TASK}, 403),
    ):  # fmt: skip
        answer = respond(proxy, "POST", f"/t/{UP}/r/mine/{path}", tokens[UP], json=body)
        assert answer.status_code == status, (path, answer.text)
        if path == "api/end":
            # The URL names the rollout that ends: the token's own.
            assert [view["rollout"] for view in before] == [view["rollout"] for view in others(proxy)]
            begun = respond(proxy, "POST", f"/api/v1/tasks/{UP}/rollouts", ROOT, json={"rollout": "mine"}).json()
            tokens[UP] = begun["token"]
    assert others(proxy) == before


def test_own_rollout_is_served_in_every_form(proxy: Running, tokens: dict[str, str]) -> None:
    own = {"x-forkpoint-task": TASK, "x-forkpoint-rollout": "mine"}
    for headers in forms(tokens[TASK]):
        for path, names in ((f"/t/{TASK}/r/mine", {}), ("/e", own), ("/e", {})):
            answer = proxy.client.post(f"{path}/shell/exec", json=SHELL, headers={**headers, **names})
            assert answer.json()["stdout"] == "/root\n", answer.text


def test_ended_rollout_s_token_opens_nothing(proxy: Running) -> None:
    path = f"/api/v1/tasks/{TASK}/rollouts"
    token = respond(proxy, "POST", path, ROOT, json={"rollout": "brief"}).json()["token"]
    assert respond(proxy, "POST", f"/t/{TASK}/r/brief/shell/exec", token, json=SHELL).status_code == 200
    respond(proxy, "DELETE", f"{path}/brief", ROOT)
    for _ in range(2):
        assert respond(proxy, "POST", f"/t/{TASK}/r/brief/shell/exec", token, json=SHELL).status_code == 401
        # Another rollout of this name has another token.
        respond(proxy, "POST", path, ROOT, json={"rollout": "brief"})


# -- no token reaches a tool server ----------------------------------------------------------------------------------


def carriers(token: str) -> list[dict[str, str]]:
    basic = base64.b64encode(f"user:{token}".encode()).decode()
    return [
        {"authorization": f"Bearer {token}"}, {"authorization": token}, {"authorization": f"Basic {basic}"},
        {"x-api-key": token}, {"x-forkpoint-token": token},
        {"cookie": f"a=b; token={token}"}, {"x-custom": f"prefix:{token}"}, {"x-custom": token.replace("-", "%2D")},
        {"sec-websocket-protocol": f"token.{token}"}, {"referer": f"http://x/?t={token}"},
    ]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["api", "plain"])
def test_no_token_reaches_an_upstream(proxy: Running, tokens: dict[str, str], endpoint: str) -> None:
    """Whichever token in whichever header, beside the one that opens the way; other headers do reach it."""
    for address in (f"/t/{UP}/r/mine/{endpoint}/x", f"/e/{endpoint}/x"):
        for token in (ROOT, ALICE, tokens[UP]):
            names = {"x-forkpoint-task": UP, "x-forkpoint-rollout": "mine"} if address.startswith("/e") else {}
            for carried in carriers(token):
                for way in forms(ROOT) + forms(ALICE) + forms(tokens[UP]):
                    headers = {**way, **names, **carried, "x-mine": "kept"}
                    answer = proxy.client.post(address, json={}, headers=headers)
                    if answer.status_code == 401:
                        # The header that opens the way was replaced by one that does not.
                        continue
                    received = answer.json()
                    assert answer.status_code == 200, answer.text
                    seen = json.dumps(received)
                    assert not any(secret in seen for secret in (ROOT, ALICE, tokens[UP], "fp_")), (headers, received)
                    assert ["x-mine", "kept"] in received["headers"]


def test_target_with_a_token_is_refused(proxy: Running, tokens: dict[str, str]) -> None:
    for token in (ROOT, ALICE, tokens[UP]):
        for target in (f"x?key={token}", f"x/{token}", f"x?a={token.replace('-', '%2d').replace('fp_', '%66p_')}"):
            answer = respond(proxy, "GET", f"/t/{UP}/r/mine/plain/{target}", ROOT)
            assert (answer.status_code, answer.json()["type"]) == (400, "urn:forkpoint:token")


def test_without_tokens_a_rollout_s_token_reaches_no_upstream(tmp_path: Path) -> None:
    """A proxy on loopback needs no token; its rollouts' tokens are addresses, and no business of the tools."""
    with echoing() as url, serving(tmp_path, drivers={"http": HttpDriver(tmp_path / "http")}) as open_proxy:
        open_proxy.client.put("/api/v1/tasks/t", json=spec_of(url)).raise_for_status()
        token = open_proxy.client.post("/api/v1/tasks/t/rollouts", json={"rollout": "r"}).json()["token"]
        for carried in carriers(token):
            for address in ("/t/t/r/r/plain/x", "/e/api/x", "/e/plain/x"):
                headers = {"x-api-key": token, **carried} if address.startswith("/e") else carried
                answer = open_proxy.client.post(address, headers=headers, json={})
                assert (answer.status_code, "fp_" in answer.text) == (200, False), (address, headers, answer.text)
        kept = open_proxy.client.post("/t/t/r/r/plain/x", headers={"authorization": "Bearer tool's-own-key-0123456789"})
        assert "tool's-own-key-0123456789" in kept.text


def test_upstream_cannot_pretend_to_be_the_proxy(proxy: Running) -> None:
    """In both modes, recorded and relayed, on a miss and on a hit."""
    for endpoint, headers in (("plain", {}), ("api", {}), ("api", {}), ("plain", {"range": "bytes=0-"})):
        answer = respond(proxy, "POST", f"/t/{UP}/r/other/{endpoint}/x", ROOT, json={}, headers=headers)
        assert answer.status_code == 200
        for name, value in OURS.items():
            assert value not in answer.headers.get_list(name), (endpoint, name, answer.headers)
        assert len(answer.headers.get_list("cache-status")) == 1
        assert answer.headers["set-cookie"] == f"sid=1; Path = /t/{UP}/r/other/{endpoint}/"
