"""A Forkpoint sandbox for tinker-cookbook's `harbor_rl` and other recipes that accept a `sandbox_factory`.

`HarborDatasetBuilder(..., sandbox_factory=factory("http://127.0.0.1:8700", spec_of))`: the name of a
task's folder is the task, and each sandbox is a rollout of it. Rollouts of a group begin with the same commands; from
the second rollout on, the task's tree answers them. Each command has a shell of its own, as in the original: `cd` and
variables of one command do not reach the next.
"""

import asyncio
import itertools
import json
import os
import shlex
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tinker_cookbook.sandbox.sandbox_interface import SandboxResult

_COUNT = itertools.count()
_TIMED_OUT = 124


class ForkpointSandbox:
    """A `SandboxInterface` whose commands run in Forkpoint."""

    def __init__(self, url: str, task: str, rollout: str) -> None:
        """Make the client of a rollout; the first command begins it.

        Args:
            url: Base URL of the proxy.
            task: Name of a task that has a spec.
            rollout: Name that no other running rollout of the task has.
        """
        self._control = f"{url}/api/v1/tasks/{task}/rollouts/{rollout}"
        self._shell, self._rollout = f"{url}/t/{task}/r/{rollout}/shell", rollout

    @property
    def sandbox_id(self) -> str:
        """Name of the rollout."""
        return self._rollout

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Do nothing: a rollout needs no heartbeat, because its state is kept."""

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        """Run a command in a shell of its own; a timeout is exit code 124."""
        line = f"bash -c {shlex.quote(command)}"
        if workdir is not None:
            line = f"(cd {shlex.quote(workdir)} && exec {line})"
        body = json.dumps({"command": line, "timeout_s": timeout}).encode()
        result = json.loads((await self._ask("POST", f"{self._shell}/exec", body, timeout))[1])
        code = _TIMED_OUT if result["timed_out"] else result["exit_code"]
        max_bytes = max_output_bytes or 128 << 10
        return SandboxResult(
            stdout=_cut(result["stdout"], max_bytes), stderr=_cut(result["stderr"], max_bytes), exit_code=code
        )

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        """Return the content of a file as standard output; exit code 1 if the file cannot be read."""
        status, content = await self._ask("GET", self._file(path), None, timeout)
        if status != 200:
            return SandboxResult(stdout="", stderr=content.decode(), exit_code=1)
        return SandboxResult(stdout=content[:max_bytes].decode(errors="replace"), stderr="", exit_code=0)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Write a file; exit code 1 if the file cannot be written."""
        data = content.encode() if isinstance(content, str) else content
        status, error = await self._ask("PUT", self._file(path), data, timeout)
        if status >= 400:
            return SandboxResult(stdout="", stderr=error.decode(), exit_code=1)
        if executable:
            return await self.run_command(f"chmod +x {shlex.quote(path)}", timeout=timeout)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        """End the rollout. Its records stay and answer later rollouts of the task."""
        await self._ask("DELETE", self._control, None, 60)

    def _file(self, path: str) -> str:
        return f"{self._shell}/files{urllib.parse.quote(os.path.join('/', path))}"

    async def _ask(self, method: str, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
        # A restore may come before the call.
        return await asyncio.to_thread(_answer, request, timeout_s + 60)


def factory(url: str, spec_of: Callable[[Path], dict[str, Any]]) -> Callable[[Path, int], Awaitable[ForkpointSandbox]]:
    """Return a `sandbox_factory`.

    Args:
        url: Base URL of the proxy.
        spec_of: Returns the environment spec of a task's folder.
    """

    async def make(env_dir: Path, timeout: int) -> ForkpointSandbox:
        task = urllib.parse.quote(env_dir.name, safe="")
        body = json.dumps(spec_of(env_dir)).encode()
        request = urllib.request.Request(
            f"{url}/api/v1/tasks/{task}", body, {"Content-Type": "application/json"}, method="PUT"
        )
        status, error = await asyncio.to_thread(_answer, request, timeout)
        if status >= 400:
            raise RuntimeError(error.decode())
        return ForkpointSandbox(url, task, f"tinker-{os.getpid()}-{next(_COUNT)}")

    return make


def _answer(request: urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return int(response.status), bytes(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")
