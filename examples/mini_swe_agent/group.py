"""Run a group of mini-swe-agent rollouts through Forkpoint, with a scripted model instead of a language model.

    ./run serve &
    pip install . mini-swe-agent==2.4.6
    python examples/mini_swe_agent/group.py [http://127.0.0.1:8700]

It needs the docker command line and no Docker daemon: the task's spec names the driver `local`.
"""

# mypy: disable-error-code="import-not-found"

import os
import sys

from forkpoint import Client

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8700"
TASK = "mini-swe-agent-example"
SHARED = ["mkdir -p app && echo 'print(6 * 7)' > app/answer.py", "cat app/answer.py", "python3 app/answer.py"]


def submission(name: str, docker_host: str) -> str:
    """Run one agent to its end and return what it submits."""
    # Only this variable differs from Docker.
    os.environ["DOCKER_HOST"] = docker_host
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    from minisweagent.agents.default import DefaultAgent  # noqa: PLC0415
    from minisweagent.environments.docker import DockerEnvironment  # noqa: PLC0415
    from minisweagent.models.test_models import DeterministicModel, make_output  # noqa: PLC0415

    own = [f"echo '# by {name}' >> app/answer.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat app/answer.py"]
    model = DeterministicModel(outputs=[make_output("", [{"command": command}], cost=0.0) for command in SHARED + own])
    agent = DefaultAgent(
        model, DockerEnvironment(image="any:latest", cwd="/root"), system_template="", instance_template="{{task}}"
    )
    return str(agent.run("Write the answer down.")["submission"])


def main() -> None:
    """Run three agents and print how each of their commands was answered."""
    with Client(URL) as client:
        task = client.task(TASK)
        task.put({"driver": "local"})
        for name in ("one", "two", "three"):
            rollout = task.rollout(name)
            submitted = submission(name, rollout.docker_host)
            print(name, [step.outcome for step in rollout.info().steps], repr(submitted))


if __name__ == "__main__":
    main()
