"""What agents leave running: waited for by polls, and started by the time that an agent comes back to it."""

import time

import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, require_sandboxes

SERVER = """
import http.server, time
time.sleep(0.7)
http.server.HTTPServer(("127.0.0.1", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
THINKS_S = 1.5
WAYS = ("with checkpoints", "by replay")


def run(proxy: Proxy, rollout: str, command: str) -> tuple[str, bool]:
    """Return what a command prints, and whether that was known."""
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
def test_a_server_that_is_slow_to_start_is_there_for_each_rollout_that_thought_as_long(way: str) -> None:
    require(way)
    with real_proxy(checkpoints=way == WAYS[0], keeps_all=False) as proxy:
        proxy.put("b", files={"/root/server.py": SERVER})
        for rollout in ("a", "b", "c"):
            assert run(proxy, rollout, "python3 server.py >/dev/null 2>&1 &") == ("", rollout != "a")
            time.sleep(THINKS_S)
            # Each leaves the tree here, where the server has just been started.
            assert run(proxy, rollout, ask(f"server.py?{rollout}")) == ("200\n", False)
            assert run(proxy, rollout, ask("server.py")) == ("200\n", False)


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_for_a_job_is_told_when_it_is_done_and_the_others_when_they_have_asked_as_often(way: str) -> None:
    require(way)
    poll = "cat done 2>/dev/null || echo not yet"
    with real_proxy(checkpoints=way == WAYS[0], keeps_all=False) as proxy:
        proxy.put("b")
        polls = {}
        for rollout in ("a", "b"):
            run(proxy, rollout, "(sleep 1; echo it is done > done; sleep 1000) >/dev/null 2>&1 &")
            told = [run(proxy, rollout, poll)]
            while told[-1][0] == "not yet\n" and len(told) < 100:
                if rollout == "a":
                    time.sleep(0.2)
                told.append(run(proxy, rollout, poll))
            assert told[-1][0] == "it is done\n"
            polls[rollout] = told
        assert len(polls["a"]) > 2
        assert [answer for answer, _ in polls["b"]] == [answer for answer, _ in polls["a"]]
        assert all(known for _, known in polls["b"])


@pytest.mark.parametrize("way", WAYS)
def test_who_comes_back_late_is_not_told_what_one_was_who_came_at_once(way: str) -> None:
    require(way)
    with real_proxy(checkpoints=way == WAYS[0], keeps_all=False) as proxy:
        proxy.put("b", files={"/root/server.py": SERVER})
        told = {}
        for rollout, thinks_s in (("hasty", 0.0), ("slow", 4.0), ("slower", 4.5)):
            run(proxy, rollout, "python3 server.py >/dev/null 2>&1 &")
            time.sleep(thinks_s)
            told[rollout] = run(proxy, rollout, ask("server.py"))
        assert "refused" in told["hasty"][0]
        assert told["slow"] == ("200\n", False)
        assert told["slower"] == ("200\n", True)
