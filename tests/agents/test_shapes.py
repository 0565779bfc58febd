"""The shipped dialects, each with a server of its shape inside a sandbox, through the whole proxy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, wait_until

PROGRAM = Path(__file__).with_name("shapes_server.py").read_text()
HIT = "forkpoint; hit"


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_criu()
    with real_proxy(checkpoints=True) as running:
        yield running


def put(proxy: Proxy, task: str, kind: str, dialect: str, **more: Any) -> None:
    server = {"command": f"exec python3 /srv.py 9000 {kind}", "port": 9000, "dialect": dialect, **more}
    proxy.put(task, files={"/srv.py": PROGRAM}, servers={"tool": server})


class Video:
    """The authors' client: a base URL, and an id in each body."""

    def __init__(self, proxy: Proxy, sandbox: str) -> None:
        self.client, self.sandbox = proxy.client, sandbox
        self.last: httpx.Response | None = None

    def post(self, path: str, **body: Any) -> Any:
        self.last = self.client.post(f"/t/video/tool{path}", json={"sandbox_id": self.sandbox, **body})
        assert self.last.is_success, self.last.text
        return self.last.json()

    def execute(self, command: str, argument: str) -> str:
        return str(self.post("/execute", command=command, argument=argument)["result"])

    @property
    def hit(self) -> bool:
        assert self.last is not None
        return self.last.headers["cache-status"] == HIT


def test_the_authors_wire_is_shared_forked_and_stopped(proxy: Proxy) -> None:
    put(proxy, "video", "video", "tvcache")
    first, second = Video(proxy, "task_aaa"), Video(proxy, "task_bbb")
    assert first.post("/start") == {"success": True, "sandbox_id": "task_aaa", "sandbox_path": "/tmp/task_aaa"}
    assert second.post("/start") == {"success": True, "sandbox_id": "task_bbb", "sandbox_path": "/tmp/task_bbb"}
    assert second.hit
    result = first.execute("load", "film")
    assert result.startswith("task_aaa: film 0.")
    assert second.execute("load", "film") == result.replace("task_aaa", "task_bbb")
    assert second.hit
    wait_until(lambda: proxy.is_kept("video"), "no checkpoint was taken")
    forked = Video(proxy, second.post("/fork")["sandbox_id"])
    assert forked.sandbox not in ("task_aaa", "task_bbb")
    assert forked.execute("cut", "x").startswith(f"{forked.sandbox}: film x 0.")
    assert second.execute("cut", "y").startswith("task_bbb: film y 0.")
    assert second.post("/stop") == {"success": True, "sandbox_id": "task_bbb"}
    # The name is free: it begins again, at the root.
    second.post("/start")
    assert second.hit


def test_a_stateless_sandbox_answers_each_code_once(proxy: Proxy) -> None:
    put(proxy, "fusion", "fusion", "sandbox-fusion", start="root")
    draw = {"code": "import random; print(random.random())", "language": "python"}
    one, other = (proxy.client.post(f"/t/fusion/r/{r}/tool/run_code", json=draw) for r in ("a", "b"))
    assert one.json() == other.json()
    assert other.headers["cache-status"] == HIT
    failed = proxy.client.post("/t/fusion/r/a/tool/run_code", json={"code": "1/0"})
    assert failed.json()["status"] == "Failed"
    again = proxy.client.post("/t/fusion/r/b/tool/run_code", json=draw)
    assert again.headers["cache-status"] == HIT, "a read did not move anybody"


def test_cookie_names_the_gym_servers_session(proxy: Proxy) -> None:
    """A cookie names the session of a gym server."""
    put(proxy, "gym", "gym", "nemo-gym")
    clients = [httpx.Client(base_url=f"{proxy.url}/t/gym/tool", trust_env=False, timeout=30) for _ in range(3)]
    answers = []
    for client in clients:
        client.post("/seed_session", json={"start": 5}).raise_for_status()
        answers.append(client.post("/add", json={"n": 1}))
    assert [answer.json()["sum"] for answer in answers] == [6, 6, 6]
    assert len({answer.json()["luck"] for answer in answers}) == 1
    assert [answer.headers["cache-status"] == HIT for answer in answers] == [False, True, True]
    wait_until(lambda: proxy.is_kept("gym"), "no checkpoint was taken")
    sums = [client.post("/add", json={"n": n * 10}).json()["sum"] for n, client in enumerate(clients)]
    assert sums == [6, 16, 26]
    nobody = httpx.post(f"{proxy.url}/t/gym/tool/add", json={"n": 1}, trust_env=False)
    assert nobody.status_code == 400
    for client in clients:
        client.close()
