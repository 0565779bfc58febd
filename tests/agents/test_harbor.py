"""Harbor, unmodified, runs trials whose environments are rollouts, with an agent and with its own verifier."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from forkpoint.image_builds import ImageBuilder
from tests.agents.clients import newer_python, packages, run
from tests.agents.serving import real_proxy
from tests.machine import require_criu, require_sandboxes
from tests.proxy.compat.harness import scripted_agent_text
from tests.sandboxes.docker import AGENT_IMAGE, make_agent_image, require_docker
from tests.sandboxes.image_archives import agent_image
from tests.scripted_model import scripted_model


def test_harbor_trials_share_their_prefix(tmp_path: Path) -> None:
    """Uploads, downloads, the agent's commands and the verifier's: the second trial makes the first one's calls.

    The third trial diverges at the agent's second command, and its reward is its own.
    """
    require_sandboxes()
    python = newer_python()
    place = packages("harbor==0.24.0", python=python)
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    draw = "echo $RANDOM$RANDOM $WHO > drawn; cat drawn"
    group = [[draw, "touch mine"], [draw, "touch mine"], [draw, "cat drawn; ls"]]
    with real_proxy() as proxy:
        first, second, third = run(
            place, "harbor_client.py", proxy.url, str(tmp_path), json.dumps(group), "", python=python,
            env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "HOME": str(tmp_path)},
        )  # fmt: skip
        task = proxy.client.get("/api/v1/tasks").json()["items"][0]["task"]
        rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
        outcomes = [proxy.outcomes(task, row["rollout"]) for row in rollouts]
    shown, rewards, verified, _ = first
    drawn = shown[0][0]
    assert drawn.endswith(" me\n")
    assert (shown[1], rewards, verified) == ([None, None, 0], {"reward": 1.0}, drawn)
    assert second == first
    assert third == [[shown[0], [f"{drawn}drawn\n", None, 0]], {"reward": 0.0}, drawn, {}]
    assert set(outcomes[0]) == {"miss"}
    assert set(outcomes[1]) == {"hit"}
    # What Harbor prepares, what the agent prepares, and the agent's first command.
    assert outcomes[2] == ["hit"] * 3 + ["miss"] * (len(outcomes[0]) - 3)
    assert all(row["finished"] for row in rollouts)


def test_an_agent_that_a_trial_starts_in_its_sandbox_is_a_harness(tmp_path: Path) -> None:
    """The second trial's model says the same, and nothing runs for it; the third one's differs in its second turn."""
    require_criu()
    python = newer_python()
    place = packages("harbor==0.24.0", python=python)
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    spec = {"files": {"/agent.py": scripted_agent_text()}}

    def say(number: int, who: str) -> str | None:
        return None if number > 2 else f"echo {who or number} >> drawn; cat drawn"

    # The client's token is for some tasks, so the operator has to allow the model.
    with scripted_model(say) as model, real_proxy(checkpoints=True, sources=(model.root,)) as proxy:
        urls = [model.url("a"), model.url("b"), model.url("c", 1)]
        group = [[f"agent {url} python3 /agent.py anthropic; echo $?", "touch mine"] for url in urls]
        trials = run(
            place, "harbor_client.py", proxy.url, str(tmp_path), json.dumps(group), json.dumps(spec), python=python,
            env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "HOME": str(tmp_path)},
        )  # fmt: skip
        task = proxy.client.get("/api/v1/tasks").json()["items"][0]["task"]
        rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
        outcomes = [proxy.outcomes(task, row["rollout"]) for row in rollouts]
    assert [verified for _, _, verified, _ in trials] == ["0\n1\n2\n", "0\n1\n2\n", "0\nc\n2\n"]
    assert [rewards for _, rewards, _, _ in trials] == [{"reward": 1.0}] * 3
    assert trials[0][0][0][0] == trials[1][0][0][0]
    assert trials[0][0][0][0].endswith("\n7\n")
    assert set(outcomes[1]) == {"hit"}
    assert outcomes[2].count("miss") < len(outcomes[0])
    assert set(model.keys) == {"secret"}


COMPOSE = """
services:
  main:
    image: IMAGE
    command: sleep infinity
    volumes: [shared:/shared]
    depends_on: [db]
  db:
    image: IMAGE
    command:
      - python3
      - -c
      - |
        import socketserver
        class Answer(socketserver.StreamRequestHandler):
            def handle(self):
                self.wfile.write(b"row " + open("/rows/count", "rb").read())
        open("/rows/count", "w").write("0\\n")
        socketserver.TCPServer(("0.0.0.0", 5432), Answer).serve_forever()
    environment: {KIND: side}
    ports: ["15432:5432"]
    volumes: [shared:/rows]
volumes: {shared: {}}
"""


def test_harbor_task_with_a_compose_file(tmp_path: Path) -> None:
    """The agent meets the service of the task's compose file, and the second trial makes only hits.

    After the agent, a hook runs in the service, and files of the service are collected. Links lead to files of its own.
    """
    require_sandboxes()
    python = newer_python()
    place = packages("harbor==0.24.0", python=python)
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    commands = ["cat </dev/tcp/db/5432; echo 1 >/shared/count", "cat </dev/tcp/db/5432 >drawn; cat drawn; touch mine"]
    with real_proxy() as proxy:
        first, second = run(
            place, "harbor_client.py", proxy.url, str(tmp_path), json.dumps([commands] * 2),
            COMPOSE.replace("IMAGE", agent_image()), python=python,
            env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "HOME": str(tmp_path)},
        )  # fmt: skip
        task = proxy.client.get("/api/v1/tasks").json()["items"][0]["task"]
        rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
        outcomes = [set(proxy.outcomes(task, row["rollout"])) for row in rollouts]
    assert first[0] == [["row 0\n", None, 0], ["row 1\n", None, 0]]
    assert (first[1], second) == ({"reward": 1.0}, first)
    assert first[3] == {"link.txt": "side 1\n", "seen.txt": "side 1\n"}
    assert outcomes[1] == {"hit"}


def test_harbor_task_with_a_dockerfile(tmp_path: Path) -> None:
    """The task names no image: its Dockerfile is built by the first trial, and the second one finds the image."""
    require_sandboxes()
    require_docker()
    make_agent_image()
    python = newer_python()
    place = packages("harbor==0.24.0", python=python)
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    dockerfile = f"FROM {AGENT_IMAGE}\nENV OF={os.getpid()}\nRUN echo built >/built\n"
    try:
        with real_proxy() as proxy:
            first, second = run(
                place, "harbor_client.py", proxy.url, str(tmp_path),
                json.dumps([["cat /built; echo $OF >drawn", "touch mine"]] * 2), dockerfile, python=python,
                env={
                    "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "HOME": str(tmp_path),
                    **{name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ},
                },
            )  # fmt: skip
            task = proxy.client.get("/api/v1/tasks").json()["items"][0]["task"]
            rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
            outcomes = [set(proxy.outcomes(task, row["rollout"])) for row in rollouts]
    finally:
        image = ImageBuilder(tmp_path / "task" / "environment")()
        subprocess.run(["docker", "rmi", image], capture_output=True, check=True)
    assert first[0][0] == ["built\n", None, 0]
    assert (first[1:3], second) == ([{"reward": 1.0}, f"{os.getpid()}\n"], first)
    assert outcomes[1] == {"hit"}
