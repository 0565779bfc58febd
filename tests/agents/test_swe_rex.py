"""SWE-ReX's own client and server, unmodified, with Forkpoint between them and without."""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.workloads.ephemeral_proxy import free_port
from tests.agents.clients import PYTHON, packages, run
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, require_sandboxes, wait_until

REQUIREMENTS = ("swe-rex==1.4.0", "aiohttp")
SERVER = "exec python3 -m swerex.server --host 127.0.0.1 --port 9000 --auth-token token"
GROUP = ("p1", "p2", "p3", "p4", "p5", "p6")
WORK = Path("/tmp/forkpoint-swe-rex")


@pytest.fixture(scope="module")
def place() -> Path:
    require_sandboxes()
    return packages(*REQUIREMENTS)


def put(proxy: Proxy, place: Path) -> None:
    server = {
        "command": SERVER,
        "port": 9000,
        "dialect": "swe-rex",
        "env": {"PYTHONPATH": "/opt/swe-rex"},
        "ready": "/",
    }
    proxy.put("swe", archives=[{"source": str(place), "target": "/opt/swe-rex"}], servers={"rex": server})


@contextmanager
def directly(place: Path) -> Iterator[str]:
    """Run the project's own server, with no Forkpoint; its URL."""
    port = free_port()
    home = tempfile.mkdtemp()
    process = subprocess.Popen(
        [PYTHON, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", "token"],
        env={"PYTHONPATH": str(place), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home}, cwd=home,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}"), "the server does not start", within_s=30)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(home)
        # What an agent leaves running goes when its directory does.
        shutil.rmtree(WORK, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, headers={"X-API-Key": "token"}, trust_env=False).is_success
    except httpx.TransportError:
        return False


def plain(value: Any, part: str) -> Any:
    """Return answers without what differs from machine to machine and run to run: prompts, pids, luck and names."""
    if isinstance(value, dict):
        return {name: plain(member, part) for name, member in value.items()}
    if isinstance(value, list):
        return [plain(item, part) for item in value]
    if isinstance(value, str):
        value = re.sub(r"\S+@\S+:\S*[#$] ", "PROMPT ", value)
        value = re.sub(r"\b0\.[0-9]{6,}", "DRAWN", value)
        value = re.sub(r"\[1\] +[0-9]+", "[1] PID", value)
        return re.sub(rf"\b{part}\b", "PART", value)
    return value


def outcomes(proxy: Proxy, rollout: str) -> list[str]:
    """Return how each call of a rollout was answered, in order."""
    found = proxy.client.get(f"/api/v1/tasks/swe/rollouts/{rollout}").json()["steps"]["items"]
    return [step["outcome"] for step in found]


@pytest.mark.parametrize("way", ["with checkpoints", "by replay"])
def test_diverging_group_gets_the_original_servers_results(place: Path, way: str) -> None:
    """The settings are the default ones: what is kept is what anybody's proxy keeps."""
    if way == "with checkpoints":
        require_criu()
    extra = [] if way == "with checkpoints" else ["steady"]
    # A replay runs the shared part again, time limits and all: one shows what there is to see.
    group = GROUP if way == "with checkpoints" else GROUP[:2]
    with directly(place) as url:
        shared, alone = run(place, "swe_rex_client.py", url, "p0", *extra)
    with real_proxy(checkpoints=way == "with checkpoints", keeps_all=False, warm_sandboxes=8) as proxy:
        put(proxy, place)
        told = {}
        for part in group:
            _, told[part] = run(place, "swe_rex_client.py", f"{proxy.url}/t/swe/r/{part}/rex", part, *extra)
        asked = shared - 1
        hits = {part: outcomes(proxy, part)[:asked] for part in group[1:]}
        counts = proxy.client.get("/api/v1/stats").json()
    for part in group:
        assert plain(told[part], part) == plain(alone, "p0")
        # The same luck for all: what the prefix drew is read back after the fork.
        assert told[part][:shared] == told["p1"][:shared]
        assert told[part][shared + 2]["output"].endswith(told["p1"][7]["output"])
    assert hits == {part: ["hit"] * asked for part in group[1:]}
    assert counts["divergences"] == 0


def test_health_is_answered_while_a_sandbox_starts(place: Path) -> None:
    """The health request is answered within its client's timeout while a sandbox is being started."""
    with real_proxy() as proxy:
        put(proxy, place)
        start = time.monotonic()
        answer = proxy.client.get("/t/swe/r/new/rex/is_alive", headers={"X-API-Key": "token"})
        assert answer.json() == {"is_alive": True, "message": ""}
        assert time.monotonic() - start < 0.15
        assert not proxy.engine.pool.roster.slots


def test_wrong_ways_get_the_projects_own_errors(place: Path) -> None:
    with real_proxy() as proxy:
        put(proxy, place)
        base = "/t/swe/r/bad/rex"
        headers = {"X-API-Key": "token"}
        assert proxy.client.get(f"{base}/no/such", headers=headers).json() == {"detail": "Not Found"}
        assert proxy.client.get(f"{base}/execute", headers=headers).status_code == 405
        broken = proxy.client.post(f"{base}/execute", content=b"{", headers=headers)
        assert broken.status_code == 422
        missing = proxy.client.post(f"{base}/read_file", json={"path": "/no/such"}, headers=headers)
        assert missing.status_code == 511
        assert missing.json()["swerexception"]["class_path"] == "builtins.FileNotFoundError"
        again = proxy.client.post("/t/swe/r/bad2/rex/read_file", json={"path": "/no/such"}, headers=headers)
        assert again.json() == missing.json()
