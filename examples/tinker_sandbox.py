"""A sandbox for tinker-cookbook's `harbor_rl` and other recipes that take a `sandbox_factory`, over Forkpoint.

`HarborDatasetBuilder(..., sandbox_factory=factory("http://127.0.0.1:8700", spec_of))`: a task's folder is the task,
each sandbox that is asked for is a rollout of it. The rollouts of a group make the same first commands, and those after
the first are answered from the task's tree. Each command has a shell of its own, as in the original: `cd` and variables
of one do not reach the next.
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
    """See `SandboxInterface`. task: as it was PUT; rollout: a name that no other running one has."""

    def __init__(self, url: str, task: str, rollout: str) -> None:
        self._control = f"{url}/api/v1/tasks/{task}/rollouts/{rollout}"
        self._shell, self._rollout = f"{url}/t/{task}/r/{rollout}/shell", rollout

    @property
    def sandbox_id(self) -> str:
        return self._rollout

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """See `SandboxInterface`. A rollout needs none: its state is kept."""

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        line = f"bash -c {shlex.quote(command)}"
        if workdir is not None:
            line = f"(cd {shlex.quote(workdir)} && exec {line})"
        body = json.dumps({"command": line, "timeout_s": timeout}).encode()
        told = json.loads((await self._ask("POST", f"{self._shell}/exec", body, timeout))[1])
        code = _TIMED_OUT if told["timed_out"] else told["exit_code"]
        most = max_output_bytes or 128 << 10
        return SandboxResult(stdout=_cut(told["stdout"], most), stderr=_cut(told["stderr"], most), exit_code=code)

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        status, content = await self._ask("GET", self._file(path), None, timeout)
        if status != 200:
            return SandboxResult(stdout="", stderr=content.decode(), exit_code=1)
        return SandboxResult(stdout=content[:max_bytes].decode(errors="replace"), stderr="", exit_code=0)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        data = content.encode() if isinstance(content, str) else content
        status, said = await self._ask("PUT", self._file(path), data, timeout)
        if status >= 400:
            return SandboxResult(stdout="", stderr=said.decode(), exit_code=1)
        if executable:
            return await self.run_command(f"chmod +x {shlex.quote(path)}", timeout=timeout)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        """End the rollout; the next one of the task finds what it did."""
        await self._ask("DELETE", self._control, None, 60)

    def _file(self, path: str) -> str:
        return f"{self._shell}/files{urllib.parse.quote(os.path.join('/', path))}"

    async def _ask(self, method: str, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
        # A restore may come on top.
        return await asyncio.to_thread(_answer, request, timeout_s + 60)


def factory(url: str, spec_of: Callable[[Path], dict[str, Any]]) -> Callable[[Path, int], Awaitable[ForkpointSandbox]]:
    """Return a `sandbox_factory`; spec_of: makes the environment spec of a task's folder."""

    async def make(env_dir: Path, timeout: int) -> ForkpointSandbox:
        task = urllib.parse.quote(env_dir.name, safe="")
        body = json.dumps(spec_of(env_dir)).encode()
        request = urllib.request.Request(
            f"{url}/api/v1/tasks/{task}", body, {"Content-Type": "application/json"}, method="PUT"
        )
        status, said = await asyncio.to_thread(_answer, request, timeout)
        if status >= 400:
            raise RuntimeError(said.decode())
        return ForkpointSandbox(url, task, f"tinker-{os.getpid()}-{next(_COUNT)}")

    return make


def _answer(request: urllib.request.Request, within_s: float) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=within_s) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")
