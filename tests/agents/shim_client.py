"""SkyRL-gym's SQL environment and tinker-cookbook's sandboxes, unmodified, with the shims of examples/ in them.

argv: which of them, the proxy's URL, and a directory. Prints what a group of three saw; the third one diverges at its
last call.
"""

# mypy: disable-error-code="import-not-found, unused-ignore, misc, no-any-return"

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def skyrl(url: str, folder: str) -> list[Any]:
    """Play three episodes of SQL, whose statements that write stay in the original tool group."""
    from skyrl_gym.envs.sql import env  # noqa: PLC0415 - only one of the packages is there
    from skyrl_sql import ForkpointSQL  # noqa: PLC0415

    env.SQLCodeExecutorToolGroup = lambda db_file_path: ForkpointSQL(db_file_path, url)
    extras = {"db_id": "shop", "reward_spec": {"ground_truth": "SELECT x FROM t"}, "data": "spider"}
    group = []
    for number in range(3):
        episode = env.SQLEnv(env.Text2SQLEnvConfig(folder), extras)
        statements = ["SELECT x FROM t", "SELECT y FROM t", "INSERT INTO t VALUES (3)", f"SELECT {number // 2}"]
        steps = [episode.step(f"<think>?</think><sql>{statement}</sql>") for statement in statements]
        last = episode.step("<think>?</think><solution>SELECT x FROM t</solution>")
        group.append([[step["observations"][0]["content"] for step in steps], last["reward"]])
    return group


async def tinker(url: str, folder: str) -> list[Any]:
    """Use three sandboxes of a task's folder as the recipe `harbor_rl` does."""
    from tinker_cookbook.sandbox import SandboxInterface, SandboxResult  # noqa: PLC0415 - see above
    from tinker_sandbox import factory  # noqa: PLC0415

    make = factory(url, lambda task: {"files": {"/root/name": task.name}})
    group = []
    for number in range(3):
        sandbox = await make(Path(folder), 60)
        assert isinstance(sandbox, SandboxInterface)
        results = [
            await sandbox.run_command("cat name; x=1; exit 3"),
            await sandbox.run_command("pwd; echo $x", workdir="/tmp"),
            await sandbox.write_file("/root/run.sh", "#!/bin/bash\necho $RANDOM > drawn; echo ran\n", executable=True),
            await sandbox.run_command("./run.sh", max_output_bytes=2),
            await sandbox.read_file("/root/run.sh", max_bytes=9),
            await sandbox.read_file("/root/none"),
            await sandbox.run_command(f"cat drawn; echo {number // 2}"),
            await sandbox.run_command("sleep 60", timeout=1),
        ]
        assert all(isinstance(result, SandboxResult) for result in results)
        group.append([[result.stdout, result.exit_code] for result in results])
        await sandbox.cleanup()
    return group


if __name__ == "__main__":
    which, *arguments = sys.argv[1:]
    print(json.dumps(skyrl(*arguments) if which == "skyrl" else asyncio.run(tinker(*arguments))))
