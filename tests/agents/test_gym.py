"""NeMo-Gym's shape: sessions by signed cookies, which Starlette's own middleware makes and reads."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.agents.clients import packages
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, wait_until

HIT = "forkpoint; hit"


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_criu()
    place = packages("starlette", "itsdangerous", "uvicorn")
    with real_proxy(checkpoints=True) as running:
        server = {
            "command": "exec python3 /srv/app.py 9000", "port": 9000, "dialect": "nemo-gym",
            "env": {"PYTHONPATH": "/opt/gym"},
        }  # fmt: skip
        running.put(
            "gym",
            archives=[{"source": str(place), "target": "/opt/gym"}],
            files={"/srv/app.py": Path(__file__).with_name("gym_server.py").read_text()},
            servers={"gym": server},
        )
        yield running


@pytest.mark.parametrize("form", ["/t/gym/gym", "/ng-rollout/gym-{n}"])
def test_gym_group_shares_its_session_until_it_diverges(proxy: Proxy, form: str) -> None:
    """A group shares its session until its rollouts diverge; each continues with the session's memory."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=proxy.url + form.format(n=n), trust_env=False, timeout=60))
            for n in range(6)
        ]
        answers = []
        for client in clients:
            client.post("/seed_session", json={"start": 5, "of": form}).raise_for_status()
            answers.append(client.post("/add", json={"n": 1}))
        assert [answer.json()["sum"] for answer in answers] == [6] * 6
        assert [answer.headers["cache-status"] == HIT for answer in answers] == [False, *[True] * 5]
        lucky = {answer.json()["luck"] for answer in answers}
        assert len(lucky) == 1
        wait_until(lambda: proxy.is_kept("gym"), "no checkpoint was taken")
        parted = [client.post("/add", json={"n": n}).json() for n, client in enumerate(clients)]
        assert parted == [{"sum": 6 + n, "luck": lucky.copy().pop()} for n in range(6)]
        assert [client.post("/verify").json() for client in clients] == [{"reward": 6 + n} for n in range(6)]


def test_an_alias_needs_a_task_with_one_server(proxy: Proxy) -> None:
    proxy.put("none")
    for path in ("/ng-rollout/none-1/add", "/ng-rollout/nohyphen/add"):
        answer = proxy.client.post(path, json={})
        assert answer.status_code in (400, 404)
        assert answer.json()["type"].startswith("urn:forkpoint:")
