"""MCP: the official SDK's clients, both wires, unmodified, and stock servers inside sandboxes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

from tests.agents.clients import node_packages, packages, run
from tests.agents.mcp_requests import HIT, NEW, OLD, Agent, spec, text_of
from tests.agents.serving import real_proxy
from tests.machine import require_criu, require_sandboxes

HERE = Path(__file__).parent
CLIENTS = (
    (OLD, "-", "/t/m/r/a/mcp"),
    (OLD, "-", "/t/m/r/b/mcp/memory"),
    (NEW, "auto", "/t/m/r/c/mcp"),
    (NEW, "2026-07-28", "/t/m/r/d/mcp"),
    (NEW, "legacy", "/t/m/mcp"),
    (OLD, "-", "/t/m/mcp"),
)
"""SDK, mode, URL: with the rollout in the URL, and by the session that we name."""


def plain(answers: list[Any], part: str) -> Any:
    text = re.sub(r"\b0\.[0-9]{6,}", "0.5", json.dumps(answers))
    return json.loads(re.sub(rf"\b{part}\b", "PART", text))


def test_diverging_mcp_group_gets_the_servers_own_results() -> None:
    """Rollouts with several SDKs and transports diverge; each gets the results that the server alone gives."""
    require_criu()
    shared, alone, progress, tools = run(packages(OLD), "mcp_client.py", str(HERE / "mcp_server.py"), "-", "p9")
    runs = []
    with real_proxy(checkpoints=True, keeps_all=False, warm_sandboxes=8) as proxy:
        proxy.put("m", **spec())
        for number, (sdk, mode, path) in enumerate(CLIENTS):
            runs.append(run(packages(sdk), "mcp_client.py", proxy.url + path, mode, f"p{number}"))
            if number == 0:
                before = proxy.client.get("/api/v1/stats").json()
        after = proxy.client.get("/api/v1/stats").json()
        rows = proxy.client.get("/api/v1/tasks/m/rollouts").json()["items"]
        # Those that ask for lists have names that no URL can have.
        finished = [row["finished"] for row in rows if not row["rollout"].startswith("~")]
    for number, (_, answers, heard, offered) in enumerate(runs):
        assert plain(answers, f"p{number}") == plain(alone, "p9")
        assert answers[:shared] == runs[0][1][:shared]
        # What the prefix drew is read back behind the fork.
        assert answers[shared + 1]["structuredContent"]["result"] == str(answers[1]["structuredContent"]["result"])
        assert heard == progress
        own = [] if CLIENTS[number][2].endswith("memory") else ["exec", "read_file", "write_file"]
        assert offered == own + tools
    # The prefix, and the list of tools.
    assert after["hits"] - before["hits"] == (shared + 1) * (len(CLIENTS) - 1)
    assert after["divergences"] == 0
    # Sessions that we named ended with their clients; rollouts of URLs go on.
    assert sum(finished) == 2


def test_lines_of_the_manual_run(tmp_path: Path) -> None:
    """The page shows a client without a framework; its lines run as they are written, in a function."""
    page = (HERE.parents[1] / "docs" / "agents" / "mcp.md").read_text()
    lines = page.partition("## Without a framework\n```python\n")[2].partition("```")[0]
    program = tmp_path / "client.py"
    program.write_text(
        f"import asyncio, sys\nurl = sys.argv[1]\nasync def main():\n{indent(lines, '    ')}\nasyncio.run(main())\n"
    )
    with real_proxy() as proxy:
        proxy.put("p", files={"/root/Makefile": "all:\n\techo built > app\n"})
        command = [sys.executable, str(program), f"{proxy.url}/t/p/r/1/mcp"]
        environment = {**os.environ, "PYTHONPATH": str(packages(OLD))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "echo built > app" in done.stdout


STOCK = "mcp-server-sqlite==2025.4.25"

STOCK_MAIN = "from mcp_server_sqlite import main; main()"


def test_group_on_sqlite_server_shares_its_prefix() -> None:
    """mcp-server-sqlite, unmodified: a database in a file, and insights in its memory."""
    require_sandboxes()
    entry = {"command": "python3", "args": ["-c", STOCK_MAIN, "--db-path", "/root/db"], "ready_s": 120}
    archive = {"source": str(packages(STOCK, OLD)), "target": "/opt/stock"}
    with real_proxy(warm_sandboxes=4) as proxy:
        proxy.put("s", archives=[archive], mcp_servers={"db": {**entry, "env": {"PYTHONPATH": "/opt/stock"}}})
        for part in range(1, 4):
            agent = Agent(proxy, f"/t/s/r/r{part}/mcp/db")
            prefix = [
                agent.tool("create_table", query="CREATE TABLE t (x)"),
                agent.tool("write_query", query="INSERT INTO t VALUES (7)"),
                agent.tool("append_insight", insight="seven is shared"),
                agent.tool("read_query", query="SELECT x FROM t"),
            ]
            assert "{'x': 7}" in prefix[3].text
            assert [answer.headers["cache-status"] == HIT for answer in prefix] == [part > 1] * 4
            agent.tool("write_query", query=f"INSERT INTO t VALUES ({part * 100})")
            agent.tool("append_insight", insight=f"insight {part}")
            text = agent.tool("read_query", query="SELECT x FROM t").json()["result"]["content"][0]["text"]
            assert text == str([{"x": 7}, {"x": part * 100}])
            memo = agent.send("resources/read", {"uri": "memo://insights"}).text
            assert "seven is shared" in memo
            assert [f"insight {other}" in memo for other in range(1, 4)] == [other == part for other in range(1, 4)]


THINKING = "@modelcontextprotocol/server-sequential-thinking@2026.8.31"


def test_server_with_read_only_hint_keeps_rollouts_apart() -> None:
    """A server for Node.js, unmodified, marks its tool as read-only but keeps thoughts; each rollout has its own."""
    require_criu()
    archive = {"source": str(node_packages(THINKING) / "node_modules"), "target": "/opt/node_modules"}
    program = "/opt/node_modules/@modelcontextprotocol/server-sequential-thinking/dist/index.js"
    with real_proxy(checkpoints=True, keeps_all=False, warm_sandboxes=4) as proxy:
        proxy.put("n", archives=[archive], mcp_servers={"think": {"command": "node", "args": [program]}})
        for part in range(4):
            agent = Agent(proxy, f"/t/n/r/r{part}/mcp/think")
            for at, thought in enumerate(("first", "second", f"own {part}", "last"), start=1):
                answer = agent.tool(
                    "sequentialthinking", thought=thought, thoughtNumber=at, totalThoughts=4, nextThoughtNeeded=at < 4
                )
                assert json.loads(text_of(answer))["thoughtHistoryLength"] == at
                assert (answer.headers["cache-status"] == HIT) == (part > 0 and at < 3)
        assert proxy.client.get("/api/v1/stats").json()["failures"] == {}
