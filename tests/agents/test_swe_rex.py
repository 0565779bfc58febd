"""SWE-ReX's own client and server, unmodified, with Forkpoint between them and without."""

import itertools
import re
import secrets
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

from forkpoint.ephemeral_proxy import free_port
from tests.agents.clients import PYTHON, packages, run
from tests.agents.serving import Proxy, real_proxy
from tests.machine import PLAIN, require_criu, require_sandboxes, wait_until

REQUIREMENTS = ("swe-rex==1.4.0", "aiohttp")
SERVER = "exec python3 -m swerex.server --host 127.0.0.1 --port 9000 --auth-token token"
ATTEMPTS = 3
"""How often answers are collected until they are the original's. The project gives bash 0.1 s for a prompt. If a prompt
comes later, its own server too takes it for the end of the next command, whose output then shows one answer too late.
"""
GROUP = ("p1", "p2", "p3")


@pytest.fixture(scope="module")
def place() -> Path:
    require_sandboxes()
    return packages(*REQUIREMENTS)


def put(proxy: Proxy, place: Path, task: str, **more: Any) -> None:
    """Give a task its environment, which is no other task's: else they would share a tree."""
    server = {
        "command": SERVER,
        "port": 9000,
        "dialect": "swe-rex",
        "env": {"PYTHONPATH": "/opt/swe-rex"},
        "ready": "/",
    }
    archives = [{"source": str(place), "target": "/opt/swe-rex"}]
    proxy.put(task, archives=archives, servers={"rex": server}, env={"TASK": task}, **more)


@contextmanager
def directly(place: Path, work: str) -> Iterator[str]:
    """Run the project's own server, with no Forkpoint; its URL. work: where its agent works."""
    port = free_port()
    home = tempfile.mkdtemp()
    process = subprocess.Popen(
        [PYTHON, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", "token"],
        env={"PYTHONPATH": str(place), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home}, cwd=home,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}"), "the server does not start", within_s=120)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(home)
        # What an agent leaves running goes when its directory does.
        shutil.rmtree(work, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, headers={"X-API-Key": "token"}, trust_env=False, verify=PLAIN).is_success
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
        # An empty line shows if bash reads the request for the exit code only after its prompt.
        value = re.sub(r"\n+", "\n", value)
        return re.sub(rf"\b{part}\b", "PART", value)
    return value


@pytest.mark.parametrize("way", ["with checkpoints", "by replay"])
def test_diverging_group_gets_the_original_servers_results(place: Path, way: str) -> None:
    """The settings are the default ones: what is kept is what anybody's proxy keeps."""
    if way == "with checkpoints":
        require_criu()
    extra = [] if way == "with checkpoints" else ["steady"]
    # A replay runs the shared part again, time limits and all: one shows what there is to see.
    group = GROUP if way == "with checkpoints" else GROUP[:2]
    work = f"/tmp/forkpoint-swe-rex-{secrets.token_hex(4)}"

    def agent(url: str, part: str) -> Any:
        return run(place, "swe_rex_client.py", url, part, *extra, WORK=work)

    with real_proxy(checkpoints=way == "with checkpoints", keeps_all=False, warm_sandboxes=8) as proxy:
        for task in (f"swe-{attempt}" for attempt in range(ATTEMPTS)):
            with directly(place, work) as url:
                shared, alone = agent(url, "p0")
            # One of the calls runs out of time, for each plain server too.
            put(proxy, place, task, timeouts="shared")
            answers = {part: agent(f"{proxy.url}/t/{task}/r/{part}/rex", part)[1] for part in group}
            asked = shared - 1
            for part in group:
                # The same luck for all, also where the project's own was bad.
                assert answers[part][:shared] == answers["p1"][:shared]
            for part in group[1:]:
                assert proxy.outcomes(task, part)[:asked] == ["hit"] * asked
            if all(plain(answers[part], part) == plain(alone, "p0") for part in group):
                break
        if extra:
            # A rollout that does what the first one did runs nothing.
            assert agent(f"{proxy.url}/t/{task}/r/again/rex", "p1")[1] == answers["p1"]
            assert set(proxy.outcomes(task, "again")) == {"hit"}
        counts = proxy.client.get("/api/v1/stats").json()
    for part in group:
        assert plain(answers[part], part) == plain(alone, "p0")
        # What the prefix drew is read back after the fork.
        assert answers[part][shared + 2]["output"].strip().endswith(answers["p1"][7]["output"].strip())
    assert counts["divergences"] == 0


def test_health_is_answered_while_a_sandbox_starts(place: Path) -> None:
    """The health request is answered within its client's timeout while a sandbox is being started."""
    with real_proxy() as proxy:
        put(proxy, place, "swe")
        numbers = itertools.count()

        def is_in_time() -> bool:
            start = time.monotonic()
            answer = proxy.client.get(f"/t/swe/r/new{next(numbers)}/rex/is_alive", headers={"X-API-Key": "token"})
            assert answer.json() == {"is_alive": True, "message": ""}
            return time.monotonic() - start < 0.15

        # Other processes may hold a request up.
        wait_until(is_in_time, "no request is answered in time")
        assert not proxy.engine.pool.roster.slots


def test_timeout_of_any_name_is_its_rollouts_own(place: Path) -> None:
    """The server did not get a shell ready in time, as on a busy machine. Another rollout is not told so."""
    with real_proxy() as proxy:
        put(proxy, place, "swe")
        session = {"session_type": "bash", "startup_source": ["/tmp/slow"], "startup_timeout": 0.5}
        for rollout in ("1", "2"):
            base, headers = f"/t/swe/r/{rollout}/rex", {"X-API-Key": "token"}
            slow = {"path": "/tmp/slow", "content": "sleep 30"}
            proxy.client.post(f"{base}/write_file", json=slow, headers=headers).raise_for_status()
            late = proxy.client.post(f"{base}/create_session", json=session, headers=headers)
            assert late.json()["swerexception"]["class_path"] == "pexpect.exceptions.TIMEOUT"
            assert (late.status_code, late.headers["cache-status"]) == (511, "forkpoint; fwd=bypass")


def test_wrong_ways_get_the_projects_own_errors(place: Path) -> None:
    with real_proxy() as proxy:
        put(proxy, place, "swe")
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
