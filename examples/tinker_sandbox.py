"""A Forkpoint sandbox for tinker-cookbook's `harbor_rl` and other recipes that accept a `sandbox_factory`.

`HarborDatasetBuilder(..., sandbox_factory=factory("http://127.0.0.1:8700", spec_of))`: the name of a
task's folder is the task, and each sandbox is a rollout of it. Rollouts of a group begin with the same commands; from
the second rollout on, the task's tree answers them. Each command has a shell of its own, as in the original: `cd` and
variables of one command do not reach the next.
"""

import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tinker_cookbook.sandbox.sandbox_interface import SandboxResult

from forkpoint import AsyncClient, ForkpointError
from forkpoint.client import AsyncRollout

_TIMED_OUT = 124


class ForkpointSandbox:
    """A `SandboxInterface` whose commands run in Forkpoint."""

    def __init__(self, client: AsyncClient, rollout: AsyncRollout) -> None:
        """Make the sandbox of a rollout; the first command begins it, and `cleanup` closes the client."""
        self._client, self._rollout = client, rollout

    @property
    def sandbox_id(self) -> str:
        """Name of the rollout."""
        return self._rollout.name

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Do nothing: a rollout needs no heartbeat, because its state is kept."""

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        """Run a command in a shell of its own; a timeout is exit code 124."""
        line = f"bash -c {shlex.quote(command)}"
        if workdir is not None:
            line = f"(cd {shlex.quote(workdir)} && exec {line})"
        result = await self._rollout.exec(line, timeout_s=timeout)
        code = _TIMED_OUT if result.timed_out else result.exit_code
        max_bytes = max_output_bytes or 128 << 10
        return SandboxResult(
            stdout=_cut(result.stdout, max_bytes), stderr=_cut(result.stderr, max_bytes), exit_code=code
        )

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        """Return the content of a file as standard output; exit code 1 if the file cannot be read."""
        del timeout  # the client waits for as long as the proxy works
        try:
            file = await self._rollout.read(path)
        except ForkpointError as error:
            return SandboxResult(stdout="", stderr=error.detail, exit_code=1)
        return SandboxResult(stdout=file.content[:max_bytes].decode(errors="replace"), stderr="", exit_code=0)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Write a file; exit code 1 if the file cannot be written."""
        del timeout
        try:
            await self._rollout.write(path, content, mode="755" if executable else None)
        except ForkpointError as error:
            return SandboxResult(stdout="", stderr=error.detail, exit_code=1)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        """End the rollout. Its records stay and answer later rollouts of the task."""
        await self._rollout.finish()
        await self._client.close()


def factory(url: str, spec_of: Callable[[Path], dict[str, Any]]) -> Callable[[Path, int], Awaitable[ForkpointSandbox]]:
    """Return a `sandbox_factory`.

    Args:
        url: Base URL of the proxy.
        spec_of: Returns the environment spec of a task's folder.
    """

    async def make(env_dir: Path, timeout: int) -> ForkpointSandbox:
        del timeout
        client = AsyncClient(url)
        task = client.task(env_dir.name)
        await task.put(spec_of(env_dir))
        return ForkpointSandbox(client, task.rollout())

    return make


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")
