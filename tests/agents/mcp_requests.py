"""MCP by hand, for tests: a task with a server of MCP, and a client of either wire."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.agents.clients import packages
from tests.machine import Answering

PROGRAM = (Path(__file__).parent / "mcp_server.py").read_text()
OLD, NEW = "mcp==1.30.0", "mcp==2.3.0"
HIT = "forkpoint; hit"


def spec(**server: Any) -> dict[str, Any]:
    entry = {"command": "python3", "args": ["/srv.py"], "env": {"PYTHONPATH": "/opt/mcp"}, **server}
    archive = {"source": str(packages(OLD)), "target": "/opt/mcp"}
    return {"archives": [archive], "files": {"/srv.py": PROGRAM}, "mcp_servers": {"memory": entry}}


class Agent:
    """A client of either wire, by hand. wire: a version; session: the header to send."""

    def __init__(self, proxy: Answering, path: str, *, wire: str = "2025-11-25", session: str = "") -> None:
        self.proxy, self.path = proxy, path
        self.headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": wire}
        if session:
            self.headers["mcp-session-id"] = session
        self.ids = 0

    def send(self, method: str, params: Any = None, **members: Any) -> httpx.Response:
        self.ids += 1
        body = {"jsonrpc": "2.0", "id": self.ids, "method": method, "params": params or {}, **members}
        return self.proxy.client.post(self.path, json=body, headers=self.headers)

    def tool(self, tool: str, **arguments: Any) -> httpx.Response:
        return self.send("tools/call", {"name": tool, "arguments": arguments})


def text_of(answer: httpx.Response) -> Any:
    # A server that was long in starting is answered for in events.
    last = answer.text.strip().rpartition("\n")[2].removeprefix("data: ")
    return json.loads(last)["result"]["content"][0]["text"]
