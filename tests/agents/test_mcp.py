"""MCP by hand: sessions, cancellation, progress, lists, and requests that no client should send."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.dialects.shell import ExecArguments
from tests.agents.mcp_requests import HIT, Agent, spec, text_of
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes, wait_until


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        running.put("plain")
        running.put("m", **spec())
        yield running


def test_text_of_a_failed_command_shows_its_exit_code(proxy: Proxy) -> None:
    """Many clients show a model only the text of a result."""
    agent = Agent(proxy, "/t/plain/r/codes/mcp")
    texts = [
        agent.tool("exec", command=command, **more).json()["result"]["content"][0]["text"]
        for command, more in (("true", {}), ("false", {}), ("printf x; exit 4", {}), ("sleep 9", {"timeout_s": 0.2}))
    ]
    assert texts == ["", "[exit code 1]\n", "x\n[exit code 4]\n", "[timed out, exit code 124]\n"]


def test_optional_arguments_may_be_null(proxy: Proxy) -> None:
    """smolagents gives every argument: those that the schema marks as nullable, as null."""
    agent = Agent(proxy, "/t/plain/r/nulls/mcp")
    listed = {tool["name"]: tool for tool in agent.send("tools/list").json()["result"]["tools"]}
    members = listed["exec"]["inputSchema"]["properties"]
    assert {name: member.get("nullable", False) for name, member in members.items()} == {
        name: name != "command" for name in ExecArguments.model_fields
    }
    answer = agent.tool("exec", command="echo on", timeout_s=None, session=None).json()["result"]
    assert answer["content"][0]["text"] == "on\n"


def test_appended_mcp_is_part_of_no_name(proxy: Proxy) -> None:
    """The official inspector appends `/mcp` to URLs that do not end with it."""
    plain = Agent(proxy, "/t/plain/r/appended/mcp/mcp").send("tools/list").json()["result"]["tools"]
    assert [tool["name"] for tool in plain] == ["exec", "read_file", "write_file"]


def test_a_method_of_servers_needs_one(proxy: Proxy) -> None:
    error = Agent(proxy, "/t/plain/r/none/mcp").send("prompts/get", {"name": "greet"}).json()["error"]
    assert (error["code"], error["message"]) == (-32601, "this task has no MCP server.")


def test_rollouts_of_the_proxy_itself_are_not_listed(proxy: Proxy) -> None:
    """The proxy asks a server for its tools in a rollout of its own, which no client can name."""
    assert Agent(proxy, "/t/m/r/lists/mcp/memory").send("tools/list").is_success
    rollouts = proxy.client.get("/api/v1/tasks/m/rollouts").json()["items"]
    assert [rollout["rollout"] for rollout in rollouts if rollout["rollout"].startswith("~")] == []


def test_builtin_tools_share_records_with_the_shell(proxy: Proxy) -> None:
    """The built-in tools are the shell endpoint's calls, with the same records."""
    agent = Agent(proxy, "/t/plain/r/tools/mcp")
    assert [tool["name"] for tool in agent.send("tools/list").json()["result"]["tools"]] == [
        "exec", "read_file", "write_file",
    ]  # fmt: skip
    made = agent.tool("exec", command="echo hello > f; cat f; exit 3").json()["result"]
    assert made["content"][0]["text"] == "hello\n[exit code 3]\n"
    assert (made["isError"], made["structuredContent"]["exit_code"]) == (True, 3)
    agent.tool("write_file", path="/root/g", content="written")
    assert agent.tool("read_file", path="/root/g").json()["result"]["content"][0]["text"] == "written"
    assert agent.tool("read_file", path="/root/none").json()["result"]["isError"]
    other = proxy.client.post("/t/plain/r/other/shell/exec", json={"command": "echo hello > f; cat f; exit 3"})
    assert other.headers["cache-status"] == HIT


def test_read_only_hint_does_not_cover_memory(proxy: Proxy) -> None:
    """As stock servers have it that count what they are told in a tool that says it only reads."""
    for rollout in ("h1", "h2"):
        agent = Agent(proxy, f"/t/m/r/{rollout}/mcp")
        agent.tool("remember", key="a", value="1")
        assert [text_of(agent.tool("note", text=text)) for text in ("shared", rollout, "shared")] == ["1", "2", "3"]
        assert text_of(agent.tool("recall", key="noted")) == f"shared, {rollout}, shared"


def test_written_files_overrule_a_trusted_hint(proxy: Proxy) -> None:
    """A tool that wrote files has made a change, although its hint is trusted."""
    proxy.put("trusting", **spec(trust_hints=True))
    agent = Agent(proxy, "/t/trusting/r/hint/mcp")
    agent.tool("remember", key="a", value="1")
    first = agent.tool("recall", key="a").headers["x-forkpoint-node"]
    assert agent.tool("recall", key="a").headers["x-forkpoint-node"] == first
    assert agent.tool("touch", path="/root/t").headers["x-forkpoint-node"] != first
    assert agent.tool("exec", command="cat t").json()["result"]["content"][0]["text"] == "touched\n"


def test_sampling_result_is_private_to_its_rollout(proxy: Proxy) -> None:
    """The result of a call that asked the client's model is used for no other rollout."""
    for rollout in ("t1", "t2"):
        answer = Agent(proxy, f"/t/m/r/{rollout}/mcp").tool("think")
        assert "Sampling not supported" in answer.text
        assert answer.headers["cache-status"] == "forkpoint; fwd=bypass"


def test_ids_progress_and_forms_are_each_clients_own(proxy: Proxy) -> None:
    asked = {"name": "count", "arguments": {"to": 2}}
    first = Agent(proxy, "/t/m/r/ids1/mcp")
    assert "notifications/progress" not in first.send("tools/call", asked).text
    second = Agent(proxy, "/t/m/r/ids2/mcp", wire="2026-07-28")
    told = second.send("tools/call", {**asked, "_meta": {"progressToken": "mine"}}, id="my id")
    assert told.headers["cache-status"] == HIT
    assert told.headers["content-type"] == "text/event-stream"
    events = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: ")]
    assert [event["params"]["progressToken"] for event in events[:2]] == ["mine", "mine"]
    assert (events[2]["id"], events[2]["result"]["resultType"]) == ("my id", "complete")
    third = Agent(proxy, "/t/m/r/ids3/mcp")
    third.headers["accept"] = "text/event-stream"
    assert third.send("tools/call", asked).text.startswith("event: message\ndata: ")


def test_session_is_a_rollout_until_it_ends(proxy: Proxy) -> None:
    """A session is a rollout until its client ends it."""
    begun = Agent(proxy, "/t/m/mcp").send("initialize", {"protocolVersion": "2025-06-18"})
    session = begun.headers["mcp-session-id"]
    assert begun.json()["result"]["protocolVersion"] == "2025-06-18"
    agent = Agent(proxy, "/t/m/mcp", session=session)
    assert agent.proxy.client.post("/t/m/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"},
                                   headers=agent.headers).status_code == 202  # fmt: skip
    assert agent.tool("remember", key="s", value="1").status_code == 200
    assert proxy.client.delete("/t/m/mcp", headers=agent.headers).status_code == 204
    gone = agent.tool("recall", key="s")
    assert gone.status_code == 404
    assert "session" in gone.json()["error"]["message"]


def test_sessions_get_the_same_answers_in_their_own_forms(proxy: Proxy) -> None:
    """Requests of the same bytes in several sessions are one call, and differ in the headers alone in what they get."""

    def begin(**headers: str) -> Agent:
        begun = Agent(proxy, "/t/m-forms/mcp").send("initialize", {"protocolVersion": "2025-06-18"})
        agent = Agent(proxy, "/t/m-forms/mcp", wire="2025-06-18", session=begun.headers["mcp-session-id"])
        agent.headers |= headers
        return agent

    first, second, other_id, events = begin(), begin(), begin(), begin(accept="text/event-stream")
    other_id.ids = 40
    for nth in (1, 2, 3):
        asked = first.tool("exec", command=f"echo {nth} >> log; cat log")
        assert asked.headers["cache-status"] != HIT
        again, own, told = (
            agent.tool("exec", command=f"echo {nth} >> log; cat log") for agent in (second, other_id, events)
        )
        assert [answer.headers["cache-status"] for answer in (again, own, told)] == [HIT] * 3
        assert again.json() == asked.json()
        assert own.json() == {**asked.json(), "id": 40 + nth}
        assert told.headers["content-type"] == "text/event-stream"
        assert json.loads(told.text.split("data: ")[1]) == asked.json()
    # The form is the request's, also where all else is equal and was asked before.
    for _ in range(3):
        for form in ("application/json", "text/event-stream"):
            first.ids, first.headers["accept"] = 90, form
            assert first.tool("exec", command="cat log").headers["content-type"] == form
    # Each has taken its own steps: one that turns aside sees its own state, and no other one's.
    assert "mine" in text_of(second.tool("exec", command="echo mine >> log; cat log"))
    assert "mine" not in text_of(first.tool("exec", command="cat log"))


def raw(body: Any, status: int, code: int | None, **headers: str) -> tuple[Any, int, int | None, dict[str, str]]:
    return body, status, code, {name.replace("_", "-"): value for name, value in headers.items()}


BAD = {
    "no JSON": raw(b"{", 400, -32700),
    "a batch": raw(b"[]", 400, -32600),
    "no JSON-RPC": raw(b'{"id": 1, "method": "ping"}', 400, -32600),
    "an unknown method": raw({"method": "no/such"}, 200, -32601),
    "an unknown method on the new wire": raw({"method": "no/such"}, 404, -32601, mcp_protocol_version="2026-07-28"),
    "an unknown version": raw({"method": "ping"}, 400, -32022, mcp_protocol_version="2030-01-01"),
    "no name": raw({"method": "tools/call", "params": {}}, 200, -32602),
    "arguments that are a list": raw({"method": "tools/call", "params": {"name": "x", "arguments": [1]}}, 200, -32602),
    "half of a surrogate pair": raw(
        b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"x": "\\ud800"}}', 400, -32600
    ),
    "a subscription": raw({"method": "resources/subscribe", "params": {"uri": "memory://all"}}, 200, -32601),
    "a cursor": raw({"method": "tools/list", "params": {"cursor": "x"}}, 200, -32602),
    "a number that is too long": raw(
        {"method": "tools/call", "params": {"name": "recall", "arguments": {"key": 2**70}}}, 400, -32600
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_is_a_json_rpc_error(proxy: Proxy, case: str) -> None:
    """Invalid input is answered with a JSON-RPC error, and nothing is recorded."""
    body, status, code, headers = BAD[case]
    content = body if isinstance(body, bytes) else json.dumps({"jsonrpc": "2.0", "id": 7, **body}).encode()
    recorded = proxy.recorded
    answer = proxy.client.post("/t/m/r/bad/mcp", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert proxy.recorded == recorded


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("exec", {"cmd": "ls"}, "exec takes"),
        ("exec", {}, "command: Field required"),
        ("exec", {"command": "ls", "timeout_s": "30"}, "timeout_s"),
        ("exec", {"command": "ls", "session": "a b"}, "session"),
        ("exec", {"command": "echo a\0b"}, "NUL"),
        ("exec", {"command": "echo \ud800"}, "surrogate"),
        ("exec", {"command": "x" * (1 << 20) + "x"}, "longer than"),
        ("read_file", {}, "takes path"),
        ("read_file", {"path": ""}, "empty"),
        ("read_file", {"path": "a\0"}, "NUL"),
        ("read_file", {"path": "/a/../b"}, ".."),
        ("read_file", {"path": "/root/none"}, "/root/none does not exist in the sandbox"),
        ("write_file", {"path": "/proc/version", "content": "x"}, "/proc/version"),
    ],
)
def test_arguments_that_do_not_fit_are_results(proxy: Proxy, name: str, arguments: dict[str, Any], words: str) -> None:
    """A model reads a plain sentence and may correct its call, as MCP asks since 2025-11-25."""
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    # Python's encoder writes half of a surrogate pair as an escape.
    answer = proxy.client.post("/t/plain/r/refused/mcp", content=json.dumps(call).encode())
    assert answer.status_code == 200
    result = answer.json()["result"]
    assert result["isError"]
    (item,) = result["content"]
    assert words in item["text"]
    assert not item["text"].startswith("{")


def test_paths_are_relative_to_the_session(proxy: Proxy) -> None:
    """The file tools and the shell find the same file, in each rollout and after a restore."""
    for rollout in ("r1", "r2"):
        agent = Agent(proxy, f"/t/plain/r/{rollout}/mcp")
        agent.tool("write_file", path="a", content="at the beginning")
        assert text_of(agent.tool("exec", command="pwd; cat a; mkdir -p 'd é/e'; cd 'd é'")).endswith(
            "at the beginning"
        )
        agent.tool("write_file", path="e/b", content="below")
        assert text_of(agent.tool("exec", command="cat e/b")) == "below"
        assert text_of(agent.tool("read_file", path="../a")) == "at the beginning"
        agent.tool("exec", command="cd /")
        missing = agent.tool("read_file", path="e/b").json()["result"]
        assert missing["isError"]
    # The same directory at the same node: the second rollout's calls were hits.
    assert agent.tool("read_file", path="etc/passwd").headers["cache-status"] != HIT
    assert Agent(proxy, "/t/plain/r/r1/mcp").tool("read_file", path="etc/passwd").headers["cache-status"] == HIT


def test_stale_session_is_not_found(proxy: Proxy) -> None:
    """By its 404 a client learns that it must begin another session, whatever it asks first."""
    for task in ("m", "plain"):
        begun = Agent(proxy, f"/t/{task}/mcp").send("initialize", {"protocolVersion": "2025-11-25"})
        agent = Agent(proxy, f"/t/{task}/mcp", session=begun.headers["mcp-session-id"])
        asks: list[tuple[str, dict[str, Any]]] = [
            ("ping", {}), ("tools/list", {}), ("prompts/list", {}), ("logging/setLevel", {"level": "info"}),
            ("tools/call", {"name": "exec", "arguments": {}}),
            ("tools/call", {"name": "exec", "arguments": {"command": "true"}}),
        ]  # fmt: skip
        assert [agent.send(*ask).status_code for ask in asks[:4]] == [200] * 4
        assert proxy.client.delete(f"/t/{task}/mcp", headers=agent.headers).status_code == 204
        assert [agent.send(*ask).status_code for ask in asks] == [404] * len(asks)
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert proxy.client.post(f"/t/{task}/mcp", json=note, headers=agent.headers).status_code == 404


def test_request_without_rollout_explains_how_to_name_it(proxy: Proxy) -> None:
    """A request that names no rollout is answered with the ways to name it."""
    for wire in ("2025-11-25", "2026-07-28"):
        answer = Agent(proxy, "/t/m/mcp", wire=wire).tool("recall", key="x")
        assert answer.status_code == 400
        assert "/r/{rollout}/mcp" in answer.json()["error"]["message"]
    assert Agent(proxy, "/t/m/mcp", session="made-up").tool("recall", key="x").status_code == 404
    assert proxy.client.get("/t/m/r/x/mcp").status_code == 405
    assert proxy.client.post("/t/m/r/x/mcp/other", json={}).status_code == 404


@pytest.mark.parametrize(
    ("command", "ready_s", "words"),
    [
        (["bash", "-c", "echo broken >&2; exit 3"], 30, "broken"),
        (["bash", "-c", "while read -r; do echo no JSON; done"], 30, "no JSON"),
        (["sleep", "60"], 1, "says nothing"),
    ],
)
def test_broken_server_is_an_error_of_the_protocol(
    proxy: Proxy, command: list[str], ready_s: float, words: str
) -> None:
    """A server that does not work is reported as an error of the protocol."""
    name = f"broken-{words.replace(' ', '-')}"
    proxy.put(name, mcp_servers={"x": {"command": command[0], "args": command[1:], "ready_s": ready_s}})
    answer = Agent(proxy, f"/t/{name}/r/a/mcp").tool("anything")
    assert answer.status_code == 200
    error = answer.json()["error"]
    assert (error["code"], error["data"]["type"]) == (-32603, "urn:forkpoint:tool-server")
    assert words in error["message"]


def test_tool_names_distinguish_several_servers(proxy: Proxy) -> None:
    """The name of a tool decides which of several servers gets the call."""
    one = spec()["mcp_servers"]["memory"]
    proxy.put("two", **{**spec(), "mcp_servers": {"left": one, "right": one}})
    agent = Agent(proxy, "/t/two/r/a/mcp")
    names = [tool["name"] for tool in agent.send("tools/list").json()["result"]["tools"]]
    assert {"exec", "left__recall", "right__recall"} <= set(names)
    agent.tool("left__remember", key="k", value="of left")
    assert agent.tool("right__recall", key="k").json()["result"]["isError"]
    assert "of left" in agent.tool("left__recall", key="k").text
    assert "of left" in Agent(proxy, "/t/two/r/a/mcp/left").tool("recall", key="k").text


OVER_HTTP = {"url": "http://127.0.0.1:9000/mcp", "args": ["/srv.py", "9000"]}


FORGETS = """
import http.server, json, uuid
sessions = set()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): ...
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known, session = self.headers.get("Mcp-Session-Id") in sessions, str(uuid.uuid4())
        if asked["method"] == "initialize":
            sessions.add(session)
        elif asked.get("params", {}).get("name") == "forget":
            sessions.clear()
        answer = {"jsonrpc": "2.0", "id": asked.get("id"), "result": {"content": []}}
        self.send_response(200 if known or asked["method"] == "initialize" else 404)
        self.send_header("Mcp-Session-Id", session)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
http.server.ThreadingHTTPServer(("127.0.0.1", 9000), Handler).serve_forever()
"""


def test_session_that_a_server_has_lost_is_begun_again(proxy: Proxy) -> None:
    """As the specification has it; no client could, because its own session is with the proxy."""
    entry = {"command": "python3", "args": ["/f.py"], "url": OVER_HTTP["url"]}
    proxy.put("forgets", files={"/f.py": FORGETS}, mcp_servers={"f": entry})
    agent = Agent(proxy, "/t/forgets/r/a/mcp/f")
    for tool in ("any", "forget", "any"):
        assert json.loads(agent.tool(tool).text.rpartition("data: ")[2] or "{}")["result"] == {"content": []}


@pytest.fixture(params=["stdio", "http"])
def served(request: pytest.FixtureRequest, proxy: Proxy) -> str:
    """Return the name of a task whose server speaks over its pipes, or over a port of its sandbox."""
    if request.param == "stdio":
        return "m"
    proxy.put("over-http", **spec(**OVER_HTTP))
    return "over-http"


def test_http_server_keeps_session_and_memory(proxy: Proxy) -> None:
    """A server that speaks HTTP keeps its session and its memory."""
    proxy.put("over-http", **spec(**OVER_HTTP))
    told = []
    for task in ("m", "over-http"):
        agent = Agent(proxy, f"/t/{task}/r/same/mcp")
        agent.tool("remember", key="k", value="v")
        answers = [
            agent.tool("recall", key="k"),
            agent.tool("recall", key="none"),
            agent.tool("think"),
            agent.send("tools/call", {"name": "count", "arguments": {"to": 2}, "_meta": {"progressToken": "p"}}),
            agent.send("resources/read", {"uri": "memory://all"}),
            agent.send("prompts/get", {"name": "greet", "arguments": {"name": "you"}}),
            agent.send("tools/list"),
        ]
        told.append([answer.text for answer in answers])
    assert told[0] == told[1]
    assert "Sampling not supported" in told[1][2]
    assert told[1][3].count("event: message") == 3


class Asking:
    """A call under way, by a connection of its own; events as they come."""

    def __init__(self, proxy: Proxy, task: str, rollout: str, *, wire: str, **call: Any) -> None:
        self.agent = Agent(proxy, f"/t/{task}/r/{rollout}/mcp", wire=wire)
        self.client = httpx.Client(base_url=proxy.url, timeout=60, trust_env=False)
        body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": call}
        request = self.client.build_request("POST", self.agent.path, json=body, headers=self.agent.headers)
        self.answer = self.client.send(request, stream=True)
        assert self.answer.headers["content-type"] == "text/event-stream"
        self._lines = (json.loads(line[6:]) for line in self.answer.iter_lines() if line.startswith("data: "))

    def next(self) -> Any:
        """Return the next message."""
        return next(self._lines)

    def leave(self) -> None:
        self.answer.close()
        self.client.close()


def lingering(seconds: float, **meta: str) -> dict[str, Any]:
    return {"name": "linger", "arguments": {"seconds": seconds}, "_meta": meta}


def test_progress_is_live_and_replayed_on_a_hit(proxy: Proxy, served: str) -> None:
    """Messages that a server sends during a call reach the client at once, and again on a hit."""
    asking = Asking(proxy, served, "live", wire="2025-11-25", **lingering(2))
    assert asking.next()["params"]["data"] == "began"
    # The answer is not there yet.
    assert proxy.engine.tasks.rollouts.running[served, "live"].waiting == 1
    assert asking.next()["result"]["content"][0]["text"] == "enough"
    asking.leave()
    again = Agent(proxy, f"/t/{served}/r/live2/mcp").send("tools/call", lingering(2))
    assert again.headers["cache-status"] == HIT
    events = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: ")]
    assert [event.get("method", "answer") for event in events] == ["notifications/message", "answer"]


def test_cancellation_reaches_only_its_own_server(proxy: Proxy, served: str) -> None:
    """The cancellation of a call reaches its server and no other rollout."""
    asking = Asking(proxy, served, "cancels", wire="2025-11-25", **lingering(50))
    assert asking.next()["params"]["data"] == "began"
    told = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    assert proxy.client.post(asking.agent.path, json=told, headers=asking.agent.headers).status_code == 202
    assert asking.next()["error"]["message"] == "Request cancelled"
    asking.leave()
    # What it did when it was told is this rollout's state, as it would be without Forkpoint.
    seen = asking.agent.tool("recall", key="lingered").json()["result"]
    assert seen["content"][0]["text"] == "was cancelled"
    other = Agent(proxy, f"/t/{served}/r/other/mcp")
    assert "Error executing tool recall" in text_of(other.tool("recall", key="lingered"))


def test_disconnect_cancels_a_call_without_session(proxy: Proxy) -> None:
    """In the protocol without sessions a client cancels its call by closing the connection."""
    asking = Asking(proxy, "m", "leaves", wire="2026-07-28", **lingering(50, progressToken="p"))
    recorded = proxy.recorded
    asking.leave()
    rollout = proxy.engine.tasks.rollouts.running["m", "leaves"]
    wait_until(lambda: rollout.waiting == 0, "the call goes on", within_s=30)
    assert proxy.recorded == recorded + 1
    assert asking.agent.tool("recall", key="lingered").json()["result"]["content"][0]["text"] == "was cancelled"


PAGES = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    at = int(asked.get("params", {}).get("cursor", 0))
    tools = [{"name": f"tool{at}", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": at == 2}}]
    result = {"tools": tools, **({"nextCursor": str(at + 1)} if at < 2 else {})}
    if asked["method"] == "initialize":
        result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "p", "version": "1"}}
    if asked["method"] == "tools/call":
        result = {"content": []}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def test_lists_in_pages_come_whole(proxy: Proxy) -> None:
    proxy.put("pages", files={"/p.py": PAGES}, mcp_servers={"p": {"command": "python3", "args": ["/p.py"]}})
    agent = Agent(proxy, "/t/pages/r/a/mcp/p")
    told = agent.send("tools/list").json()["result"]
    assert [tool["name"] for tool in told["tools"]] == ["tool0", "tool1", "tool2"]
    assert "nextCursor" not in told


NOTES = """
import json, sys
notes = []
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "n", "version": "1"}}
    if asked["method"] == "tools/call":
        notes.append(asked["params"]["arguments"]["text"])
        result = {"content": []}
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("keep", *notes)]}
    elif asked["method"] == "resources/list":
        result = {"resources": [{"uri": f"note://{text}", "name": text} for text in notes]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def test_resources_are_those_of_the_rollouts_state(proxy: Proxy) -> None:
    """Whoever has made one finds it in the list, and nobody else does."""
    proxy.put("notes", files={"/n.py": NOTES}, mcp_servers={"n": {"command": "python3", "args": ["/n.py"]}})

    def listed(rollout: str) -> list[str]:
        resources = Agent(proxy, f"/t/notes/r/{rollout}/mcp/n").send("resources/list").json()["result"]["resources"]
        return [resource["name"] for resource in resources]

    for rollout in ("a", "b"):
        assert listed(rollout) == []
        assert Agent(proxy, f"/t/notes/r/{rollout}/mcp/n").tool("keep", text="milk").is_success
        assert listed(rollout) == ["milk"]
    assert listed("c") == []


def test_tools_are_those_of_the_rollouts_state(proxy: Proxy) -> None:
    """A tool may load others: the agent that called it finds them in the list."""
    proxy.put("loads", files={"/n.py": NOTES}, mcp_servers={"n": NOTES_SERVER})

    def listed(agent: Agent) -> list[str]:
        return [tool["name"] for tool in agent.send("tools/list").json()["result"]["tools"]]

    begun = Agent(proxy, "/t/loads/mcp/n").send("initialize", {"protocolVersion": "2025-11-25"})
    agents = [Agent(proxy, f"/t/loads/r/{rollout}/mcp/n") for rollout in ("a", "b")]
    agents.append(Agent(proxy, "/t/loads/mcp/n", session=begun.headers["mcp-session-id"]))
    # A list at the root is no step.
    assert [listed(agent) for agent in agents] == [["keep"]] * 3
    assert proxy.engine.tasks.rollouts.running["loads", begun.headers["mcp-session-id"]].calls == 0
    for agent in agents:
        assert agent.tool("keep", text="further").is_success
        assert listed(agent) == ["keep", "further"]
    assert listed(Agent(proxy, "/t/loads/r/c/mcp/n")) == ["keep"]
    later = Agent(proxy, "/t/loads/r/d/mcp/n")
    assert later.tool("keep", text="further").headers["cache-status"] == HIT
    assert later.send("tools/list").headers["cache-status"] == HIT
    # The rollouts go on in the tree of the environment that they began in.
    proxy.put("loads", files={"/n.py": NOTES.replace("keep", "hold")}, mcp_servers={"n": NOTES_SERVER})
    assert listed(Agent(proxy, "/t/loads/r/c/mcp/n")) == ["hold"]
    assert listed(agents[0]) == ["keep", "further"]


NOTES_SERVER = {"command": "python3", "args": ["/n.py"]}


def test_trusted_hints_are_those_of_the_tasks_own_server(proxy: Proxy) -> None:
    """Another task may have another server under the same path, whose tool of the same name changes its memory."""
    reads = NOTES.replace('{"type": "object"}}', '{"type": "object"}, "annotations": {"readOnlyHint": True}}')
    for task, program, changes in (("reads", reads, False), ("changes", NOTES, True)):
        proxy.put(task, files={"/n.py": program}, mcp_servers={"n": {**NOTES_SERVER, "trust_hints": True}})
        agent = Agent(proxy, f"/t/{task}/r/a/mcp/n")
        nodes = [agent.tool("keep", text=text).headers["x-forkpoint-node"] for text in ("one", "two")]
        assert (nodes[0] != nodes[1]) is changes


def test_sql_tools_are_offered_for_databases(proxy: Proxy) -> None:
    """The tools of the SQL endpoint are listed for tasks with databases."""
    proxy.put("db", driver="sqlite", databases={"main": {"source": str(script())}})
    agent = Agent(proxy, "/t/db/r/a/mcp")
    listed = {
        tool["name"]: tool["annotations"]["readOnlyHint"] for tool in agent.send("tools/list").json()["result"]["tools"]
    }
    assert listed == {
        "query": False, "script": False, "explain": True, "compare": True, "tables": True, "schema": True,
    }  # fmt: skip
    assert agent.tool("query", sql="INSERT INTO t VALUES (2)").json()["result"]["isError"] is False
    found = agent.tool("query", sql="SELECT * FROM t").json()["result"]
    assert found["structuredContent"]["rows"] == [[1], [2]]
    assert agent.tool("query", sql="SELECT nonsense").json()["result"]["isError"] is True
    assert agent.tool("compare", sql="SELECT 1", gold="SELECT 1").json()["result"]["structuredContent"]["match"] is True
    same = proxy.client.post("/t/db/r/b/sql/query", json={"sql": "INSERT INTO t VALUES (2)"})
    assert same.headers["cache-status"] == HIT
    wrong = agent.tool("query", statement="SELECT 1").json()["result"]
    assert (wrong["isError"], "query takes" in wrong["content"][0]["text"]) == (True, True)


def script() -> Path:
    file = Path(tempfile.mkdtemp(dir="/var/tmp")) / "t.sql"
    file.write_text("CREATE TABLE t (x); INSERT INTO t VALUES (1);")
    return file


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"url": "https://example.com/mcp"}, "url"),
        ({"url": "http://127.0.0.1:9000/mcp"}, "none of `servers` has port 9000"),
        ({"command": "x", "type": "http"}, "takes a url"),
        ({"args": ["x"]}, "a command, or a url"),
    ],
)
def test_unreachable_server_is_refused_with_its_task(proxy: Proxy, entry: dict[str, Any], words: str) -> None:
    """A task whose server cannot be reached is refused when it is put."""
    answer = proxy.client.put("/api/v1/tasks/never", json={"mcp_servers": {"x": entry}})
    assert answer.status_code == 422
    assert words in answer.text


def test_who_waits_long_is_sent_comments(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.http.exchange.COMMENT_S", 0.05)
    proxy.put("slow")
    agent = Agent(proxy, "/t/slow/r/a/mcp")
    told = agent.tool("exec", command="sleep 2; echo done").text
    assert told.startswith(": still at it")
    assert json.loads(told.splitlines()[-2][6:])["result"]["structuredContent"]["stdout"] == "done\n"
    agent.headers["accept"] = "application/json"
    assert agent.tool("exec", command="sleep 0.5; echo two").json()["result"]["structuredContent"]["stdout"] == "two\n"


def test_two_clients_of_a_rollout_take_turns(proxy: Proxy) -> None:
    """Two clients that use one rollout are answered one after the other."""
    one = Asking(proxy, "m", "both", wire="2025-11-25", **lingering(1))
    two = Agent(proxy, "/t/m/r/both/mcp")
    assert two.tool("remember", key="k", value="v").json()["result"]["isError"] is False
    assert [one.next().get("method", "answer") for _ in range(2)] == ["notifications/message", "answer"]
    one.leave()
