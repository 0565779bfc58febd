"""SandboxFusion's own client and veRL's way to ask. Its server is on no registry: what stands in has its shape."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.tree.rollout import Outcome
from sandboxes.upstream.driver import HttpDriver
from tests.agents.clients import packages, run
from tests.agents.elsewhere import Elsewhere, elsewhere
from tests.agents.serving import Proxy, real_proxy
from tests.proxy.serving import serving

PROGRAM = Path(__file__).with_name("shapes_server.py").read_text()
REQUIREMENTS = ("sandbox-fusion==0.3.7",)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with real_proxy() as running:
        command = "exec python3 /srv.py 9000 fusion"
        server = {"command": command, "port": 9000, "dialect": "sandbox-fusion", "start": "root", "ready_s": 1}
        running.put("fusion", files={"/srv.py": PROGRAM}, servers={"tool": server | {"ready_s": 30}})
        running.put("broken", servers={"tool": server | {"command": "exit 3"}})
        yield running


def test_its_own_client_runs_each_code_once(proxy: Proxy) -> None:
    place = packages(*REQUIREMENTS)
    result = run(place, "fusion_client.py", f"{proxy.url}/t/fusion/tool")
    assert [one[:2] for one in result[:3]] == [
        ["RunStatus.Success", 0],
        ["RunStatus.Success", 0],
        ["RunStatus.Failed", 1],
    ]
    assert result[0][2] == "42\n"
    assert result == result[:3] * 3
    assert proxy.engine.counts.outcomes[Outcome.MISS] == 3
    # Nobody is left behind: calls that stand alone are no rollouts.
    assert not proxy.engine.tasks.rollouts.running


def as_verl_does(url: str) -> tuple[dict[str, Any] | None, int]:
    """Return what veRL's reward call hears, and how often it asked: three times at most, again on 504 alone."""
    body = {"compile_timeout": 5, "run_timeout": 5, "code": "print(1)", "stdin": "", "memory_limit_MB": 1024,
            "language": "python", "files": {}, "fetch_files": []}  # fmt: skip
    for attempt in range(3):
        answer = httpx.post(url, json=body, timeout=20, trust_env=False)
        if answer.status_code != 504:
            answer.raise_for_status()
            return answer.json(), attempt + 1
    return None, 3


def test_verl_is_answered(proxy: Proxy) -> None:
    answer, requests = as_verl_does(f"{proxy.url}/t/fusion/tool/run_code")
    assert answer is not None
    assert (answer["run_result"]["stdout"], requests) == ("1\n", 1)


def test_verl_tries_again_when_the_trouble_is_ours(proxy: Proxy) -> None:
    recorded = proxy.recorded
    assert as_verl_does(f"{proxy.url}/t/broken/tool/run_code") == (None, 3)
    assert proxy.recorded == recorded


def test_verl_retries_after_an_upstream_failure(tmp_path: Path) -> None:
    """verl sends a call again after a failure of the server elsewhere."""
    with elsewhere() as there, serving(tmp_path, drivers={"http": HttpDriver(tmp_path / "http")}) as running:
        server = {"upstream": there.url, "dialect": "sandbox-fusion"}
        running.client.put("/api/v1/tasks/t", json={"driver": "http", "servers": {"tool": server}}).raise_for_status()
        assert as_verl_does(f"{running.client.base_url}/t/t/tool/fail") == (None, 3)
        assert there.asked == ["POST /fail"] * 3
        _together(running.client, there)


def _together(client: httpx.Client, there: Elsewhere) -> None:
    requests, start = len(there.asked), time.monotonic()
    for n in range(3):
        assert client.post("/t/t/tool/run_code", json={"n": n}).json()["echo"] == {"n": n}
    assert len(there.asked) == requests + 3
    assert time.monotonic() - start < 20
