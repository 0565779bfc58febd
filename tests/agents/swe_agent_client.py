"""One rollout of SWE-agent with a scripted model, as far as its environment sees it: argv is a URL and how it parts.

SWE-agent 1.x is on no package registry, so its model loop cannot be run here. What reaches the wire is made of swe-rex
alone, and these are its calls, in its order and with its arguments (`SWEEnv`, `ToolHandler`, `DefaultAgent`): the
deployment of `--env.deployment.type=remote`, an event loop for each call, bundles and checks by `asyncio.gather`.
Prints how many answers are shared, then all.
"""

# mypy: disable-error-code="import-not-found"

import asyncio
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from swerex.deployment.config import RemoteDeploymentConfig, get_deployment
from swerex.runtime.abstract import (
    BashAction,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

BUNDLES = ("registry", "edit_tool", "submit_tool")
STATE = "/root/state.json"
SHARED = (
    "cd /root/repo && ls",
    "grep -n bug main.py",
    "edit_tool 's/bug/fix/' main.py && cat main.py",
    'attempts=1; note() { echo "note $attempts: $1"; }; note first',
    "python3 -c 'import random; print(random.random())' > drawn; cat drawn",
    "(while [ -d . ]; do date +%s%N > beat; sleep .05; done) > /dev/null 2>&1 & echo started",
    "python3 no_such_file.py",
)


def bundle(name: str) -> Path:
    """Return a tool bundle as SWE-agent has them: a `bin` of scripts and, in one of them, an `install.sh`."""
    folder = Path(tempfile.mkdtemp()) / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / name).write_text(
        '#!/bin/bash\nsed -i "$@"\n' if name == "edit_tool" else f"#!/bin/bash\necho {name}\n"
    )
    (folder / "bin" / "_state").write_text(f'#!/bin/bash\necho "{{\\"working_dir\\": \\"$PWD\\"}}" > {STATE}\n')
    if name == "registry":
        (folder / "install.sh").write_text("export REGISTRY=here\n")
    return folder


class Agent:
    """What SWE-agent does to its environment."""

    def __init__(self, url: str) -> None:
        self.deployment = get_deployment(RemoteDeploymentConfig(host=url, port=None, auth_token="token"))  # noqa: S106
        self.answers: list[Any] = []

    def do(self, coming: Coroutine[Any, Any, Any]) -> Any:
        """Run one call in an event loop of its own; keep what it answers, or the exception that the client raises."""
        try:
            answer = asyncio.run(coming)
        except Exception as error:  # noqa: BLE001 - it is an answer too
            answer = {"raised": type(error).__name__, "message": str(error)}
        if isinstance(answer, list):
            self.answers += answer
        elif answer is not None:
            self.answers.append(answer if isinstance(answer, dict) else answer.model_dump())
        return answer

    def communicate(self, command: str, timeout: float = 25) -> None:
        action = BashAction(command=command, timeout=timeout, check="silent")
        self.do(self.deployment.runtime.run_in_session(action))

    def start(self) -> None:
        """Begin as `SWEEnv.start` and `ToolHandler.install` do."""
        self.do(self.deployment.start())
        session = CreateBashSessionRequest(startup_source=["/root/.bashrc"])
        self.do(self.deployment.runtime.create_session(session))
        self.communicate("export LANG=C.UTF-8 && export LC_ALL=C.UTF-8")
        self.communicate("cd /")
        self.communicate("cd /root/repo && export ROOT=$(pwd -P) && git status && git reset --hard", timeout=120)
        self.communicate("export PAGER=cat && export MANPAGER=cat && export GIT_PAGER=cat")
        self.communicate("pwd")
        self.do(self.upload())
        for name in BUNDLES:
            steps = [f"export PATH=/root/tools/{name}/bin:$PATH", f"chmod +x /root/tools/{name}/bin/*"]
            if name == "registry":
                steps.append(f"cd /root/tools/{name} && source install.sh")
            self.communicate(" && ".join([*steps, f"chmod +x /root/tools/{name}/bin/*"]), timeout=300)
        self.communicate("cd /root/repo")
        self.communicate("echo $PATH")
        self.do(self.check())
        for path, content in (("/root/.swe-agent-env", "{}"), (STATE, "{}")):
            self.do(self.deployment.runtime.write_file(WriteFileRequest(path=path, content=content)))

    async def upload(self) -> None:
        requests = [UploadRequest(source_path=str(bundle(n)), target_path=f"/root/tools/{n}") for n in BUNDLES]
        await asyncio.gather(*(self.deployment.runtime.upload(request) for request in requests))

    async def check(self) -> list[Any]:
        env = {"PATH": ":".join([*(f"/root/tools/{name}/bin" for name in BUNDLES), "/usr/bin:/bin"])}
        commands = [Command(command=f"which {name}", shell=True, check=True, env=env) for name in BUNDLES]  # noqa: S604
        answers = await asyncio.gather(*(self.deployment.runtime.execute(command) for command in commands))
        return [answer.model_dump() for answer in answers]

    def step(self, action: str, timeout: float = 30) -> None:
        """Take one step of the model's: the action, then the state."""
        self.communicate(action, timeout)
        self.communicate("_state")
        self.do(self.deployment.runtime.read_file(ReadFileRequest(path=STATE)))

    def part(self, part: str) -> None:
        """Go on where this rollout leaves the others."""
        self.step(f"note {shlex.quote(part)}; pwd; echo $REGISTRY; cat main.py drawn; git diff --stat")
        self.step(
            'a=$(cat beat); for i in {1..90}; do [ "$(cat beat)" = "$a" ] || break; sleep .1; done; '
            "echo beat $((i < 90))"
        )
        self.step(f"echo {part} >> main.py; attempts={part}; cd /; note second; tail -1 root/repo/main.py")
        self.step("cd /root/repo && kill %1; wait %1; submit_tool; git diff | tail -1")
        self.do(self.deployment.stop())


def main(url: str, part: str) -> list[Any]:
    agent = Agent(url)
    agent.start()
    for action in SHARED:
        agent.step(action)
    shared = len(agent.answers)
    agent.part(part)
    return [shared, agent.answers]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
    # A deployment that is collected at the end of the process says so on stdout.
    os._exit(0)
