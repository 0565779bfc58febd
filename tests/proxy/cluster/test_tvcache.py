"""The cache API of TVCACHE's authors through any member: its requests name their task in their query or body."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx

from tests.agents.test_tvclient import Call, Sandbox, rollout, truth
from tests.proxy.cluster.nodes import MORTAL, Node, nodes

TASK = "group"


def run(node: Node, *calls: Call) -> tuple[list[str], int]:
    """Let a rollout of the client library make calls through a member; return the answers, and how many it executed."""
    proxy = cast("Any", SimpleNamespace(client=SimpleNamespace(base_url=node.url)))
    before = Sandbox.executed
    answers = asyncio.run(rollout(proxy, "semantic", list(calls), "/whole", TASK))
    return answers, Sandbox.executed - before


def test_a_report_at_one_member_is_an_answer_at_all(dsn: str, tmp_path: Path) -> None:
    """Look-ups own no task, reports reach the one owner, and its successor knows what was reported and counted."""
    same = [Call("append", "x"), Call("append", "y"), Call("read")]
    fork = [*same[:2], Call("append", "z")]
    with nodes(tmp_path, dsn, "ab", FORKPOINT_DRIVERS='["client"]', **MORTAL) as members:
        a, b = members.values()
        assert httpx.get(f"{b.url}/t/all/tvcache/get?task_name={TASK}&tool_calls=x").json()["found"] is False
        assert httpx.put(f"{b.url}/t/all/tvcache/put", json={"task_name": TASK}).status_code == 422
        assert run(a, *same) == (truth(same), 3)
        assert run(b, *same) == (truth(same), 0)
        assert run(b, *fork) == (truth(fork), 1), "the sandbox that the first client holds was forked"
        owners = {each["name"]: each["tasks"] for each in httpx.get(f"{b.url}/api/v1/cluster").json()["members"]}
        assert owners == {"a": 1, "b": 0}
        counts = [httpx.get(f"{b.url}/api/v1/tasks/{TASK}/report?by=task").json()["total"]]
        a.kill()
        counts.append(httpx.get(f"{b.url}/api/v1/tasks/{TASK}/report?by=task", timeout=60).json()["total"])
        assert [[each[name] for name in ("calls", "hits", "misses")] for each in counts] == [[9, 5, 4]] * 2
        assert run(b, *fork) == (truth(fork), 0)
        assert run(b, *fork, Call("append", "w"))[0][-1] == "x/y/z/w"
