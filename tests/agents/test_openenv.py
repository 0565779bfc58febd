"""OpenEnv's own client and server library, unmodified, with Forkpoint between them and without."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkpoint.ephemeral_proxy import free_port
from proxy.tree.rollout import Outcome
from tests.agents.clients import PYTHON, packages, run
from tests.agents.serving import real_proxy
from tests.machine import PLAIN, require_criu, require_sandboxes, wait_until

NEEDED = ("fastapi", "uvicorn", "websockets", "requests", "pydantic", "httpx", "pyyaml", "typer", "rich", "fastmcp<4")
"""Of all that they say they need (a web interface, a model's client), what is needed to serve and to ask."""
VERSIONS = {"openenv==0.10.0": 4, "openenv-core==0.3.0": 3}
"""And how many rollouts each is tried with."""
PROGRAM = Path(__file__).with_name("openenv_environment.py")
SHARED = 6


@contextmanager
def directly(place: Path) -> Iterator[str]:
    """Run the environment's server with no Forkpoint; its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [PYTHON, str(PROGRAM), url.rpartition(":")[2]],
        env={"PYTHONPATH": str(place), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(place / "home")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: _answers(url), "the server does not start", within_s=60)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, verify=PLAIN).is_success
    except httpx.TransportError:
        return False


def lucky(episode: list[Any]) -> list[str]:
    """Return the lots that an episode received, in their order."""
    return [one[0]["luck"] for one in episode if isinstance(one, list) and one[0].get("luck")]


def plain(value: Any) -> Any:
    """Return answers without what differs from run to run."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items() if name != "luck"}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("version", "size"), VERSIONS.items())
def test_group_runs_its_prefix_once(version: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A group gets the results that it would get without the proxy, and its prefix runs once."""
    require_sandboxes()
    require_criu()
    place = packages(*NEEDED, bare=(version,))
    with directly(place) as url:
        alone = run(place, "openenv_client.py", "0", *[url] * size)["episodes"]
    with real_proxy(checkpoints=True) as proxy:
        server = {
            "command": "exec python3 /srv/env.py 9000", "port": 9000, "dialect": "openenv", "ready": "/health",
            "env": {"PYTHONPATH": "/opt/openenv", "PYTHONDONTWRITEBYTECODE": "1"}, "ready_s": 60,
        }  # fmt: skip
        proxy.put(
            "env",
            archives=[{"source": str(place), "target": "/opt/openenv"}],
            files={"/srv/env.py": PROGRAM.read_text()},
            servers={"env": server},
        )
        # Half of them have their rollout in the URL, for the others it is that of their connection.
        urls = [f"{proxy.url}/t/env/{f'r/{n}/' if n % 2 else ''}env" for n in range(size)]
        through = run(place, "openenv_client.py", "2", *urls)
        episodes = through["episodes"]
        outcomes = proxy.engine.counts.outcomes
    assert plain(episodes) == plain(alone)
    # All of the prefix, from the second rollout on; and the second episode of one of them.
    assert outcomes[Outcome.HIT] == (size - 1) * SHARED + 2
    drawn = {lucky(episode)[0] for episode in episodes}
    assert len(drawn) == 1, "the prefix ran more than once"
    assert all(set(lucky(episode)[:-2]) == drawn for episode in episodes), "another server's memory"
    assert lucky(episodes[-1])[-1] not in drawn
    # Its clients do not wait for the end of the connection.
    assert "Exception in ASGI application" not in caplog.text
