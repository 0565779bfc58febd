"""mini-swe-agent, unmodified, with a scripted model, over the docker command line: before Forkpoint and Docker."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agents.clients import PYTHON, packages, run
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, require_sandboxes
from tests.sandboxes.docker import BASH_IMAGE, require_docker

REQUIREMENTS = ("mini-swe-agent==2.4.6",)
GROUP = ("p1", "p2", "p3")


@pytest.fixture(scope="module")
def place() -> Path:
    if shutil.which("docker") is None:
        assert not os.environ.get("FORKPOINT_NEEDS_DOCKER")
        pytest.skip("the docker command line is not installed")
    return packages(*REQUIREMENTS)


def agent(place: Path, host: str, part: str, tmp_path: Path, *, steady: bool) -> Any:
    """Return how many commands are shared, and what the model of one rollout sees."""
    extra = ["steady"] if steady else []
    return run(
        place, "mini_swe_client.py", part, *extra, DOCKER_HOST=host, IMAGE=BASH_IMAGE, MSWEA_SILENT_STARTUP="1",
        MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path), DOCKER_CONFIG=str(tmp_path),
    )  # fmt: skip


def group(proxy: Proxy, place: Path, tmp_path: Path, parts: tuple[str, ...], *, steady: bool) -> tuple[int, Any]:
    """Run the group's rollouts, and check what they have in common; return how many commands are shared, and all."""
    told = {}
    for part in parts:
        host = f"tcp://{proxy.address[0]}:{proxy.address[1]}/t/mini/r/{part}/docker"
        shared, told[part] = agent(place, host, part, tmp_path, steady=steady)
        assert told[part][:shared] == told[parts[0]][:shared]
        # What the prefix drew is read back after the fork.
        drawn = told[parts[0]][2].split("<output>")[1].split("</output>")[0].strip()
        assert drawn in told[part][shared]
        assert f"{part}\nwritten" in told[part][shared].replace("\r", "")
    hits = {part: outcomes(proxy, part)[:shared] for part in parts[1:]}
    assert hits == {part: ["hit"] * shared for part in parts[1:]}
    assert proxy.client.get("/api/v1/stats").json()["failures"] == {}
    return shared, told


def outcomes(proxy: Proxy, rollout: str) -> list[str]:
    found = proxy.client.get(f"/api/v1/tasks/mini/rollouts/{rollout}").json()["steps"]["items"]
    return [step["outcome"] for step in found]


def plain(seen: Any, part: str) -> list[Any]:
    """Return observations without what differs from run to run: luck, and the part's name."""
    told = [re.sub(r"(?<![0-9.])0\.[0-9]{6,}(?:e-\d+)?", "DRAWN", str(one)) for one in seen]
    return [re.sub(rf"\b{part}\b", "PART", one) for one in told]


@pytest.mark.parametrize("way", ["with checkpoints", "by replay"])
def test_local_group_gets_the_results_of_one(place: Path, tmp_path: Path, way: str) -> None:
    """A group with the local driver gets the results of a rollout that runs alone."""
    require_sandboxes()
    steady = way == "by replay"
    if not steady:
        require_criu()
    with real_proxy(checkpoints=not steady) as proxy:
        proxy.put("mini", workdir="/root")
        _, told = group(proxy, place, tmp_path, GROUP, steady=steady)
        if steady:
            # Without live processes no answer has an age: a rollout that does what the first one did runs nothing.
            again = f"tcp://{proxy.address[0]}:{proxy.address[1]}/t/mini/r/again/docker"
            assert agent(place, again, GROUP[0], tmp_path, steady=steady)[1] == told[GROUP[0]]
            assert set(outcomes(proxy, "again")) == {"hit"}
    with real_proxy(checkpoints=False) as proxy:
        proxy.put("mini", workdir="/root", cache="never")
        host = f"tcp://{proxy.address[0]}:{proxy.address[1]}/t/mini/r/p0/docker"
        _, alone = agent(place, host, "p0", tmp_path, steady=steady)
    for part, seen in told.items():
        assert plain(seen, part) == plain(alone, "p0")


def test_a_group_over_an_image_gets_what_docker_says(place: Path, tmp_path: Path) -> None:
    require_docker()
    require_criu()
    _, alone = agent(place, os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"), "p0", tmp_path, steady=False)
    with real_proxy(checkpoints=True) as proxy:
        # No PUT: the image that the client names is the environment.
        _, told = group(proxy, place, tmp_path, GROUP, steady=False)
        trees = proxy.client.get("/api/v1/tasks/mini/trees").json()["items"]
        last = proxy.client.get(f"/api/v1/tasks/mini/rollouts/{GROUP[-1]}").json()["node"]
        shown = proxy.client.get(f"/api/v1/tasks/mini/nodes/{last}").json()
    current, theirs = trees
    assert (current["calls"], theirs["driver"], theirs["rollouts"]) == (0, "local", len(GROUP))
    assert (theirs["title"], shown["id"]) == (f"local {theirs['image']}", last)
    for part, seen in told.items():
        assert plain(seen, part) == plain(alone, "p0")
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", "name=minisweagent"], capture_output=True, text=True, check=True
    )
    for container in left.stdout.split():
        subprocess.run(["docker", "rm", "-f", container], capture_output=True, check=False)


def test_the_example_runs_as_it_is(place: Path, tmp_path: Path) -> None:
    require_sandboxes()
    example = Path(__file__).parents[2] / "examples" / "mini_swe_agent" / "group.py"
    with real_proxy() as proxy:
        # As after `pip install forkpoint` beside the agent.
        path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
        own = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
        done = subprocess.run(
            [PYTHON, str(example), proxy.url], env=own, capture_output=True, text=True, check=True, timeout=120
        )
    assert "two ['hit', 'hit', 'hit', 'miss', 'miss'] 'print(6 * 7)\\n# by two\\n'" in done.stdout
