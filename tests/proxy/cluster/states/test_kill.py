"""Whole members with real sandboxes: the owner is killed, and the next one restores what it had sent."""

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.machine import require_sandboxes, wait_until
from tests.proxy.cluster.nodes import MORTAL, OUTSIDE, Node, nodes
from tests.sandboxes.egress.origin import Origin, response

FETCH = "python3 -c \"import urllib.request as u; print(u.urlopen('http://example.org/').read().decode())\""
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


def test_random_bytes_survive_a_kill(dsn: str, tmp_path: Path) -> None:
    """Nothing says that a call has drawn them, and its replay would be short: the state itself is in the store."""
    require_sandboxes()

    def ask(node: Node, task: int, rollout: str, command: str) -> str:
        url = f"{node.url}/t/t{task}/r/{rollout}/shell/exec"
        response = httpx.post(url, json={"command": command}, timeout=60)
        assert response.status_code == 200, response.text
        return str(response.json()["stdout"])

    with nodes(tmp_path, dsn, "ab", FORKPOINT_DRIVERS='["local"]', **MORTAL) as members:
        a, b = members.values()
        drawn = [ask(a, task, "1", "echo $RANDOM$RANDOM > /tmp/f; cat /tmp/f") for task in range(6)]
        # Each root state, and each of these.
        wait_until(lambda: metric(a, "states_sent") >= 12, "not all states were sent", within_s=60)
        a.kill()
        wait_until(lambda: call(b, "x", "true").status_code == 200, "no task is taken over", within_s=60)
        assert [ask(b, task, "1", "cat /tmp/f") for task in range(6)] == drawn
        assert metric(b, "divergences") == 0


def test_next_owner_does_not_ask_a_host_again(dsn: str, tmp_path: Path) -> None:
    """The host answers each request differently. After a kill of the owner, its first answer is the only one.

    The next owner replays the call that asked the host, and lets a new call ask it.
    """
    require_sandboxes()

    def go(port: int) -> None:
        with ExitStack() as stack:
            settings = {"FORKPOINT_DRIVERS": '["local"]', "FORKPOINT_EGRESS": '["example.org"]'}
            members = stack.enter_context(nodes(tmp_path, dsn, "ab", module=OUTSIDE, **settings))
            a, b = members.values()
            for node in members.values():
                (node.data / "local" / "origin-port").write_text(str(port))
            spec = {"driver": "local", "egress": {"hosts": ["example.org"]}}
            put = httpx.put(f"{a.url}/api/v1/tasks/t", json=spec, timeout=60)
            assert put.is_success, put.text
            command = f"{FETCH} > /tmp/page; cat /tmp/page"
            response = call(a, "1", command)
            assert response.json()["stdout"] == "answer 1\n", response.text
            a.kill()
            wait_until(lambda: call(b, "2", command).status_code == 200, "the task is not taken over", within_s=60)
            again = call(b, "2", f"cat /tmp/page; {FETCH}")
            assert again.json()["stdout"] == "answer 1\nanswer 1\n", again.text
            shown = httpx.get(f"{b.url}/api/v1/egress", params={"task": "t"}, timeout=30).json()["items"]
            assert {each["outcome"] for each in shown} == {"repeated"}
            assert metric(b, "divergences") == 0

    async def run() -> None:
        async with Origin(lambda count: response(f"answer {count}".encode())).running() as origin:
            await asyncio.to_thread(go, origin.port)
            assert len(origin.received) == 1

    asyncio.run(run())
