"""Harbor runs trials of one task with Forkpoint's provider, a scripted agent and its own verifier.

argv: the proxy's URL, a directory, for each trial the agent's commands, as a JSON list, and the task's compose file,
its Dockerfile, its spec, or an empty text. Prints for each trial what the agent was shown, the reward, what the
verifier printed, and the files that were collected from a service.
"""

# mypy: disable-error-code="import-not-found, unused-ignore, misc, no-any-return"

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial


class Scripted(BaseAgent):
    def __init__(self, *args: Any, commands: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = commands

    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        await environment.exec("mkdir -p /installed-agent")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        assert instruction.strip() == "Write mine."
        shown = [await executed(environment, command) for command in self.commands]
        context.metadata = {"shown": [[result.stdout, result.stderr, result.return_code] for result in shown]}


async def executed(environment: Any, command: str) -> Any:
    """Run a command; "agent URL COMMAND" is one of an agent whose model is at the URL."""
    if not command.startswith("agent "):
        return await environment.exec(command, cwd="/root", env={"WHO": "me"})
    _, url, line = command.split(" ", 2)
    return await environment.exec(line, cwd="/root", env={"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "secret"})


def task(folder: Path, environment: str = "") -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm\n")
    (folder / "instruction.md").write_text("Write mine.\n")
    (folder / "task.toml").write_text(
        'version = "1.0"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n' + environment
    )
    test = "if [ -e /root/mine ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\ncat /root/drawn\n"
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}")


COLLECTED = """
[[artifacts]]
source = "/rows"
service = "db"
exclude = ["left-out.txt"]
[[artifacts]]
source = "/link.txt"
service = "db"
[[verifier.collect]]
service = "db"
command = "echo $KIND $(cat rows/count) > rows/seen.txt; touch rows/left-out.txt; ln -s /rows/seen.txt link.txt"
"""
"""What Harbor collects from a service after the agent."""


async def compose_is_refused(url: str, folder: Path) -> None:
    """A task whose services cannot be those of a sandbox does not run without them."""
    task(folder, '[environment]\ndocker_image = "main"\n')
    (folder / "environment" / "docker-compose.yaml").write_text(
        "services: {main: {}, db: {image: b, privileged: true}}\n"
    )
    environment = EnvironmentConfig(
        import_path="forkpoint.harbor:ForkpointEnvironment", kwargs={"url": url, "offline": True}
    )
    config = TrialConfig(
        task=TaskConfig(path=folder), trial_name="compose", trials_dir=folder / "trials",
        agent=AgentConfig(import_path=f"{Path(__file__).stem}:Scripted", kwargs={"commands": []}),
        environment=environment,
    )  # fmt: skip
    # The trial fails by itself: an error while it is created would end the job with all its other trials.
    result = await (await Trial.create(config)).run()
    assert "Service 'db' has 'privileged'" in result.exception_info.exception_message


async def trial(url: str, folder: Path, number: int, commands: list[str]) -> list[Any]:
    harness = any(command.startswith("agent ") for command in commands)
    environment = EnvironmentConfig(
        import_path="forkpoint.harbor:ForkpointEnvironment", kwargs={"url": url, "offline": True, "harness": harness}
    )
    agent = AgentConfig(import_path=f"{Path(__file__).stem}:Scripted", kwargs={"commands": commands})
    config = TrialConfig(
        task=TaskConfig(path=folder / "task"), trial_name=f"trial-{number}", trials_dir=folder / "trials",
        agent=agent, environment=environment,
    )  # fmt: skip
    result = await (await Trial.create(config)).run()
    assert result.exception_info is None, result.exception_info
    shown = result.agent_result.metadata["shown"]
    output = (folder / "trials" / f"trial-{number}" / "verifier" / "test-stdout.txt").read_text()
    collected = folder / "trials" / f"trial-{number}" / "artifacts"
    files = {path.name: path.read_text() for path in sorted(collected.rglob("*")) if path.suffix == ".txt"}
    return [shown, result.verifier_result.rewards, output, files]


async def main(url: str, folder: Path, group: list[list[str]], compose: str) -> list[Any]:
    built = compose.startswith("FROM")
    task(folder / "task", COLLECTED if compose and not built and not compose.startswith("{") else "")
    if built:
        (folder / "task" / "environment" / "Dockerfile").write_text(compose)
    elif compose.startswith("{"):
        (folder / "task" / "environment" / "forkpoint.json").write_text(compose)
    elif compose:
        (folder / "task" / "environment" / "docker-compose.yaml").write_text(compose)
    else:
        # An empty spec is the default environment of the proxy. It precedes the Dockerfile.
        (folder / "task" / "environment" / "forkpoint.json").write_text("{}")
        await compose_is_refused(url, folder / "compose")
    return [await trial(url, folder, number, commands) for number, commands in enumerate(group)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]))))
