"""A sandbox provider for Inspect AI: `sandbox="forkpoint"`, or `sandbox=("forkpoint", "environment.json")`.

Inspect finds it by its entry point. A sample's sandbox is a rollout. All samples of an Inspect task with the same
environment are rollouts of one Forkpoint task, so each of them is answered from the calls of the others.
"""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel, Field

from forkpoint.client import AsyncClient, AsyncRollout
from forkpoint.errors import ForkpointError, UnreachableError
from forkpoint.own_shell import line_of

_LINE_BYTES = 256 << 10
"""Limits a command's line with its standard input. The proxy takes 1 MiB; longer ones are uploaded as files before."""
_RANDOM_NAME = re.compile(r"/tmp/[A-Za-z0-9]{22}\Z")  # noqa: S108 - in the sandbox
"""Matches the path of a sample's setup script. It is new for each sample, so its calls would never repeat."""


class ForkpointConfig(BaseModel, frozen=True):
    """The environment of an Inspect task's samples.

    Attributes:
        spec: The environment, as `docs/tasks.md` describes it.
        url: The proxy's URL; None for FORKPOINT_URL, or the proxy on this machine.
        task: Name of the Forkpoint task; None for one that is made of the Inspect task and the environment.
        labels: Labels of the rollouts, such as `run`.
    """

    spec: dict[str, Any] = Field(default_factory=dict)
    url: str | None = None
    task: str | None = None
    labels: dict[str, str | int | float | bool] = Field(default_factory=dict)

    def __hash__(self) -> int:
        """Inspect keeps configurations in sets; the members that are objects have no hash of their own."""
        return hash(self.model_dump_json())

    def task_of(self, inspect_task: str) -> str:
        """Return the name of the Forkpoint task for an Inspect task."""
        if self.task is not None:
            return self.task
        # Names of Inspect tasks have other characters, and one of them may be run with several environments.
        text = json.dumps([inspect_task, self.spec], sort_keys=True)
        return f"inspect-{sha256(text.encode()).hexdigest()[:16]}"


@sandboxenv(name="forkpoint")
class ForkpointSandbox(SandboxEnvironment):
    """A rollout of a Forkpoint task as the sandbox of a sample."""

    def __init__(self, client: AsyncClient, rollout: AsyncRollout) -> None:
        """Make the sandbox of a rollout; `sample_cleanup` closes the client."""
        super().__init__()
        self._client, self._rollout, self._home = client, rollout, ""
        self._scripts: dict[str, str] = {}

    @classmethod
    def config_files(cls) -> list[str]:
        """Return the name of the file that is the environment of the Inspect tasks beside it."""
        return ["forkpoint.json"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log has as JSON."""
        return ForkpointConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Set the environment of the Forkpoint task."""
        chosen = _config(config)
        async with AsyncClient(chosen.url) as client:
            await client.task(chosen.task_of(task_name)).put(chosen.spec)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Begin the rollout of a sample."""
        del metadata  # environments do not depend on it
        chosen = _config(config)
        client = AsyncClient(chosen.url)
        rollout = client.task(chosen.task_of(task_name)).rollout(labels={"inspect": task_name[-60:], **chosen.labels})
        await rollout.begin()
        return {"default": cls(client, rollout)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Finish the rollout. Its records stay and answer later samples and runs."""
        del task_name, config, interrupted
        for environment in environments.values():
            sandbox = environment.as_type(cls)
            try:
                await sandbox.rollout.finish()
            finally:
                await sandbox._client.close()  # noqa: SLF001 - its own class

    @property
    def rollout(self) -> AsyncRollout:
        """The rollout, for scorers that fork it or read its steps."""
        return self._rollout

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - Inspect's name
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command in a shell of its own. `timeout_retry` and `concurrency` change nothing."""
        del timeout_retry, concurrency  # the proxy schedules its calls
        cmd = [self._scripts.get(word, word) for word in cmd]
        stdin = input.encode() if isinstance(input, str) else input
        uploads: list[str] = []
        if stdin is not None and len(stdin) > _LINE_BYTES:
            uploads.append(await self._upload(stdin))
            line = line_of(cmd, cwd=cwd, env=env, user=user, stdin_path=uploads[0])
        else:
            line = line_of(cmd, cwd=cwd, env=env, user=user, stdin=stdin)
        if len(line.encode()) > 2 * _LINE_BYTES:
            uploads.append(await self._upload(line.encode()))
            line = f". {uploads[-1]}"
        try:
            result = await self._rollout.exec(line, timeout_s=timeout)
        except UnreachableError as error:
            raise SandboxUnavailableError(str(error)) from error
        for path in uploads:
            await self._rollout.remove(path)
        if result.timed_out:
            raise TimeoutError(f"the command ran for longer than {timeout} s")
        if result.truncated:
            raise OutputLimitExceededError("the task's limits.output_bytes", result.stdout)
        if result.exit_code == 126 and "permission denied" in result.stderr.lower():
            raise PermissionError(result.stderr)
        return ExecResult(result.exit_code == 0, result.exit_code, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file; missing directories are created."""
        if _RANDOM_NAME.match(file):
            self._scripts[file] = _named_by(contents.encode() if isinstance(contents, str) else contents)
        try:
            await self._rollout.write(self._scripts.get(file) or await self._path(file), contents)
        except ForkpointError as error:
            raise _ERRORS.get(error.status, RuntimeError)(f"{file}: {error.detail}") from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file as text or bytes."""
        try:
            result = await self._rollout.read(await self._path(file))
        except ForkpointError as error:
            raise _ERRORS.get(error.status, RuntimeError)(f"{file}: {error.detail}") from error
        if result.media_type == "application/json":
            raise IsADirectoryError(f"{file} is a directory")
        if len(result.content) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return result.content.decode() if text else result.content

    async def _path(self, file: str) -> str:
        """Return the absolute path of a file; a relative one is below the working directory."""
        if file.startswith("/"):
            return file
        if not self._home:
            self._home = (await self._rollout.exec("pwd")).stdout.removesuffix("\n")
        return f"{self._home}/{file}"

    async def _upload(self, content: bytes) -> str:
        path = _named_by(content)
        await self._rollout.write(path, content)
        return path


def _named_by(content: bytes) -> str:
    """Return a path that equal contents share, so that samples make equal calls."""
    return f"/tmp/.forkpoint-{sha256(content).hexdigest()[:16]}"  # noqa: S108 - in the sandbox


_ERRORS: dict[int, type[Exception]] = {404: FileNotFoundError, 409: IsADirectoryError}
"""What Inspect's tools expect for the proxy's statuses."""


def _config(config: BaseModel | str | None) -> ForkpointConfig:
    if isinstance(config, ForkpointConfig):
        return config
    if isinstance(config, str):
        return ForkpointConfig(spec=json.loads(Path(config).read_text()))
    if config is None:
        return ForkpointConfig()
    raise TypeError(f"the sandbox's configuration is a ForkpointConfig or the name of a JSON file, not {config!r}")
