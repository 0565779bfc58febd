"""Whole members with real sandboxes: the owner is killed, and the next one restores what it had sent."""

import re
from pathlib import Path

import httpx

from tests.machine import require_sandboxes, wait_until
from tests.proxy.cluster.nodes import MORTAL, Node, nodes

WALK = [f"sleep 0.3; echo {number} >> /tmp/f" for number in range(3)]


def call(node: Node, rollout: str, command: str) -> httpx.Response:
    return httpx.post(f"{node.url}/t/t/r/{rollout}/shell/exec", json={"command": command}, timeout=60)


def metric(node: Node, name: str) -> float:
    found = re.search(
        rf"^forkpoint_{name}_total (\S+)$", httpx.get(f"{node.url}/metrics", timeout=30).text, re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def test_next_owner_restores_after_a_kill(dsn: str, tmp_path: Path) -> None:
    """Equal answers, in a sandbox whose base another member made."""
    require_sandboxes()
    with nodes(tmp_path, dsn, "ab", FORKPOINT_DRIVERS='["local"]', **MORTAL) as members:
        a, b = members.values()
        assert all(call(a, "1", command).status_code == 200 for command in WALK)
        wait_until(lambda: metric(a, "states_sent") >= 4, "not all states were sent", within_s=60)
        a.kill()
        wait_until(lambda: call(b, "2", WALK[0]).status_code == 200, "the task is not taken over", within_s=60)
        hits = [call(b, "2", command) for command in WALK[1:]]
        assert {hit.headers["cache-status"] for hit in hits} == {"forkpoint; hit"}
        assert call(b, "2", "cat /tmp/f").json()["stdout"] == "0\n1\n2\n"
        # A busy machine may have replayed before a state arrived; the fetch goes on all the same.
        wait_until(lambda: metric(b, "states_fetched") > 0, "no state was fetched", within_s=60)
        assert metric(b, "divergences") == 0
