"""Write a small data directory with the Forkpoint of any commit: run it in a checkout of that commit.

    git archive COMMIT | tar x -C /tmp/older && cd /tmp/older && PYTHONPATH=. python .../generate.py DIRECTORY [kill]

With `kill` the process ends without notice, so that the journal and the write-ahead log stay behind.
"""

import asyncio
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from tests.proxy.rig import ask, engine

TOKEN = "token-of-named"


async def main(data: Path, *, kill: bool) -> None:
    async with engine(data) as running:

        async def walk(task: str, name: str, *commands: str) -> Any:
            rollout = await running.tasks.rollout(task, name)
            for command in commands:
                await ask(running, rollout, command)
            return rollout

        await walk(
            "alpha", "a", "echo 1 >> log", "cat log", "mkdir d", "cd d; pwd", "echo 2 > /root/log; cat /root/log"
        )
        await walk("alpha", "b", "echo 1 >> log", "cat log", "echo other > file")
        ended = await walk("alpha", "ended", "echo 1 >> log")
        task = await running.tasks.open("alpha")
        # Earlier versions began and finished rollouts in `tasks`, and drew the token themselves.
        rollouts: Any = running.tasks if hasattr(running.tasks, "begin") else running.tasks.rollouts
        token: dict[str, Any] = {"token": TOKEN} if "token" in inspect.signature(rollouts.begin).parameters else {}
        await done(rollouts.begin(task, "named", task.tree, task.tree.root, **token))
        await done(rollouts.finish(ended))
        await walk("beta", "a", "echo beta", "sleep 100 &", "cat missing")
        if kill:
            os._exit(0)


async def done(result: Any) -> None:
    """Await a result that only some versions make awaitable."""
    if inspect.isawaitable(result):
        await result


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), kill="kill" in sys.argv[2:]))
