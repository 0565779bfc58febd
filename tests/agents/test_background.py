"""Background processes of agents: polls make progress, and services are ready as late as they were for the first."""

import time

import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, require_sandboxes

SERVER = """
import http.server, sys, time
time.sleep(float(sys.argv[1]))
http.server.HTTPServer(("127.0.0.1", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
THINKS_S = 2.0
WAYS = ("with checkpoints", "by replay")


def run(proxy: Proxy, rollout: str, command: str) -> tuple[str, bool]:
    """Run a command; return its output, and whether it was a hit."""
    answer = proxy.client.post(f"/t/b/r/{rollout}/shell/exec", json={"command": command})
    answer.raise_for_status()
    return str(answer.json()["stdout"]), "hit" in answer.headers["cache-status"]


def ask(name: str) -> str:
    return f"python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/{name}').status)\" 2>&1"


def require(way: str) -> None:
    require_sandboxes()
    if way == WAYS[0]:
        require_criu()


@pytest.mark.parametrize("way", WAYS)
def test_slow_server_is_ready_after_equal_thinking(way: str) -> None:
    """A server that starts slowly is reachable for every rollout that waited as long as the first."""
    require(way)
    with real_proxy(checkpoints=way == WAYS[0], keeps_all=False) as proxy:
        proxy.put("b", files={"/root/server.py": SERVER})
        for rollout in ("a", "b", "c"):
            assert run(proxy, rollout, "python3 server.py 0.3 >/dev/null 2>&1 &") == ("", rollout != "a")
            time.sleep(THINKS_S)
            # Every rollout diverges here, right after the server was started.
            assert run(proxy, rollout, ask(f"server.py?{rollout}")) == ("200\n", False)
            assert run(proxy, rollout, ask("server.py")) == ("200\n", False)


@pytest.mark.parametrize("way", WAYS)
def test_nth_poll_is_shared_between_rollouts(way: str) -> None:
    """A rollout polls a background job until it is done; a second one gets the same answers poll by poll."""
    require(way)
    poll = "cat done 2>/dev/null || echo not yet"
    with real_proxy(checkpoints=way == WAYS[0], keeps_all=False) as proxy:
        proxy.put("b")
        polls = {}
        for rollout in ("a", "b"):
            run(proxy, rollout, "(sleep 2; echo it is done > done; sleep 1000) >/dev/null 2>&1 &")
            answers = [run(proxy, rollout, poll)]
            while answers[-1][0] == "not yet\n" and len(answers) < 100:
                if rollout == "a":
                    time.sleep(0.2)
                answers.append(run(proxy, rollout, poll))
            assert answers[-1][0] == "it is done\n"
            polls[rollout] = answers
        assert len(polls["a"]) > 2
        assert [answer for answer, _ in polls["b"]] == [answer for answer, _ in polls["a"]]
        assert all(known for _, known in polls["b"])


@pytest.mark.parametrize("way", WAYS)
def test_early_answer_is_not_reused_late(way: str) -> None:
    """An answer from before a server was ready is not reused by a rollout that arrives later."""
    require(way)
    with real_proxy(checkpoints=way == WAYS[0], keeps_all=False) as proxy:
        proxy.put("b", files={"/root/server.py": SERVER})
        answers = {}
        for rollout, thinks_s in (("hasty", 0.0), ("slow", 4.0), ("slower", 4.5)):
            run(proxy, rollout, "python3 server.py 2 >/dev/null 2>&1 &")
            time.sleep(thinks_s)
            answers[rollout] = run(proxy, rollout, ask("server.py"))
        assert "refused" in answers["hasty"][0]
        assert answers["slow"] == ("200\n", False)
        assert answers["slower"] == ("200\n", True)
