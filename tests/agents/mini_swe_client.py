"""One rollout of mini-swe-agent with a scripted model, over the docker command line: argv is how the rollout parts.

DOCKER_HOST says where. With a second word, `steady`, nothing is drawn or left running in the shared part. Prints how
many commands are shared, then the JSON of all observations, as the agent's model sees them.
"""

# mypy: disable-error-code="import-not-found"

import json
import os
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.models.test_models import DeterministicModel, make_output

IMAGE = os.environ["IMAGE"]
NETWORK = ["--rm", "--network", "none"]
"""As sandboxes are: Docker itself must give none either."""


def script(part: str, *, steady: bool) -> tuple[int, list[str]]:
    """Return how many commands are shared, and all of them."""
    drawn = "echo 7" if steady else "python3 -c 'import random; print(random.random())'"
    left = "echo none > job" if steady else "sleep 1000 >/dev/null 2>&1 & echo $! > job"
    shared = [
        "mkdir -p work && cd work && pwd && echo written > file",
        "pwd; ls work; echo $GREETING; echo $0 $HOME; umask",
        f"{drawn} > drawn; cat drawn",
        "echo to stderr >&2; sleep 0.2; echo to stdout; exit 3",
        "no-such-command; ls /no/such",
        left + "; echo started",
        "printf 'a\\nb\\n\\xff' ; seq 3000 | tail -n 2",
        "cat <<'EOF' > patch\nline 'one' \"two\" $three\nEOF\ncat patch",
    ]
    alive = "cat job" if steady else 'kill -0 "$(cat job)" && echo it lives'
    own = [
        f"echo {part} > own; cat own work/file drawn",
        alive,
        f"cd work && echo {part} >> file && cat file && pwd",
        "cat work/file; ls",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat own drawn",
    ]
    return len(shared), shared + own


def main(part: str, *, steady: bool) -> None:
    shared, commands = script(part, steady=steady)
    model = DeterministicModel(outputs=[make_output("", [{"command": command}], cost=0.0) for command in commands])
    environment = DockerEnvironment(
        image=IMAGE, cwd="/root", env={"GREETING": "hello there"}, timeout=60, run_args=NETWORK
    )
    agent = DefaultAgent(model, environment, system_template="", instance_template="{{task}}")
    ending = agent.run("part")
    seen = [message["content"] for message in agent.messages if message["role"] == "user"][1:]
    print(json.dumps([shared, [*seen, ending]]))


if __name__ == "__main__":
    main(sys.argv[1], steady="steady" in sys.argv)
