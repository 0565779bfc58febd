"""Samples of Inspect AI that start an agent inside their sandbox.

argv: the proxy's URL, the spec, and the URLs of the samples' models as JSON. Prints what each agent has printed at its
end.
"""

# mypy: disable-error-code="import-not-found, unused-ignore"

import asyncio
import json
import sys

from forkpoint.inspect import ForkpointConfig, ForkpointSandbox

AGENT = ["python3", "/agent.py", "anthropic"]


async def sample(config: ForkpointConfig, url: str) -> str:
    environments = await ForkpointSandbox.sample_init("inside", config, {})
    sandbox = environments["default"]
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "secret"}
    ran = await sandbox.exec(AGENT, cwd="/root", env=env)
    await ForkpointSandbox.sample_cleanup("inside", config, environments, False)
    assert ran.returncode == 7, ran
    return str(ran.stdout)


async def main() -> None:
    config = ForkpointConfig(url=sys.argv[1], spec=json.loads(sys.argv[2]), harness=True)
    await ForkpointSandbox.task_init("inside", config)
    print(json.dumps([await sample(config, url) for url in json.loads(sys.argv[3])]))


if __name__ == "__main__":
    asyncio.run(main())
