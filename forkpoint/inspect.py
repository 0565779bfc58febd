"""A sandbox provider for Inspect AI: `sandbox="forkpoint"`, or `sandbox=("forkpoint", "environment.json")`.

Inspect finds it by its entry point. A sample's sandboxes are a rollout: the main container, and each of its services.
All samples of an Inspect task with the same environment are rollouts of one Forkpoint task, so each of them is answered
from the calls of the others.
"""

import json
import logging
import re
import shlex
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import yaml
from anyio import to_thread
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel, Field

from forkpoint.client import AsyncClient, AsyncRollout
from forkpoint.compose_errors import ComposeFileError
from forkpoint.compose_file import default_of, spec_of
from forkpoint.errors import ForkpointError, UnreachableError
from forkpoint.image_builds import ImageBuilder
from forkpoint.model_variables import model_variables
from forkpoint.own_shell import line_of
from forkpoint.results import ShellResult

_log = logging.getLogger(__name__)
_LINE_BYTES = 256 << 10
"""Limits a command's line with its standard input. The proxy takes 1 MiB; longer ones are uploaded as files before."""
_SERVICE_LINE_BYTES = 48 << 10
"""Limits the same in a service, where the line is one argument of `/bin/sh`. Linux takes 128 KiB for an argument."""
_COMPOSE_FILES = ["compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"]
"""Names of compose files, as Inspect looks for them."""
_RANDOM_NAME = re.compile(r"/tmp/[A-Za-z0-9]{22}\Z")  # noqa: S108 - in the sandbox
"""Matches the path of a sample's setup script. It is new for each sample, so its calls would never repeat."""


class ForkpointConfig(BaseModel, frozen=True):
    """The environment of an Inspect task's samples.

    Attributes:
        spec: The environment, as `docs/tasks.md` describes it.
        url: The proxy's URL; None for FORKPOINT_URL, or the proxy on this machine.
        task: Name of the Forkpoint task; None for one that is made of the Inspect task and the environment.
        labels: Labels of the rollouts, such as `run`.
        default: Inspect's name of the main container. Services have their own names.
        harness: Whether agents run inside the sandbox (`docs/agents/harness.md`): a command whose variables name the
            URL of a model is then one. Inspect's own bridge to a model runs in the sandbox, and needs no harness.
    """

    spec: dict[str, Any] = Field(default_factory=dict)
    url: str | None = None
    task: str | None = None
    labels: dict[str, str | int | float | bool] = Field(default_factory=dict)
    default: str = "default"
    harness: bool = False

    def __hash__(self) -> int:
        """Inspect keeps configurations in sets; the members that are objects have no hash of their own."""
        return hash(self.model_dump_json())

    @property
    def environment(self) -> dict[str, Any]:
        """The spec that the task is PUT with."""
        return {"harness": {}, **self.spec} if self.harness else self.spec

    def task_of(self, inspect_task: str) -> str:
        """Return the name of the Forkpoint task for an Inspect task."""
        if self.task is not None:
            return self.task
        # Names of Inspect tasks have other characters, and one of them may be run with several environments.
        text = json.dumps([inspect_task, self.environment], sort_keys=True)
        return f"inspect-{sha256(text.encode()).hexdigest()[:16]}"

    def sandboxes(self) -> dict[str, str | None]:
        """Return the service of each sandbox by Inspect's name; the first is the main container, with None."""
        services = list(self.spec.get("services") or ())
        if self.default in services:
            raise ValueError(f"A service is named {self.default!r}, as Inspect names the main container. Rename it.")
        return {self.default: None, **{name: name for name in services}}


@sandboxenv(name="forkpoint")
class ForkpointSandbox(SandboxEnvironment):
    """The main container of a rollout, or a service of it, as a sandbox of a sample."""

    def __init__(
        self, client: AsyncClient, rollout: AsyncRollout, service: str | None = None, *, harness: bool = False
    ) -> None:
        """Make a sandbox of a rollout; `sample_cleanup` closes the client."""
        super().__init__()
        self._client, self._rollout, self._service, self._home = client, rollout, service, ""
        self._harness = harness
        self._scripts: dict[str, str] = {}

    @classmethod
    def config_files(cls) -> list[str]:
        """Return the names of files that are the environment of the Inspect tasks beside them; the first one counts."""
        return ["forkpoint.json", *_COMPOSE_FILES, "Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log has as JSON."""
        return ForkpointConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Check the environment, so that one that no sandbox can be is refused before the first sample."""
        del task_name  # Inspect passes "startup", and each sample the name of its task
        (await to_thread.run_sync(_config, config)).sandboxes()

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Begin the rollout of a sample; return its sandboxes, the main container first."""
        del metadata  # environments do not depend on it
        chosen = await to_thread.run_sync(_config, config)
        client = AsyncClient(chosen.url)
        task = client.task(chosen.task_of(task_name))
        rollout = task.rollout(labels={"inspect": task_name[-60:], **chosen.labels})
        try:
            await task.put(chosen.environment)
            await rollout.begin()
        except BaseException:
            # Inspect cleans up only what it has been given.
            await client.close()
            raise
        return {
            name: cls(client, rollout, service, harness=chosen.harness and service is None)
            for name, service in chosen.sandboxes().items()
        }

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
        # All of them are one rollout.
        sandbox = next(iter(environments.values())).as_type(cls)
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
        model = model_variables(env or {}) if self._harness and input is None else None
        if model is not None:
            run = await self._rollout.harness(
                model.upstream, headers=model.headers, env=model.env,
                command=f"exec bash -c {shlex.quote(line_of(cmd, cwd=cwd, user=user))}",
            )  # fmt: skip
            return ExecResult(run.exit_code == 0, run.exit_code, run.log, "")
        stdin = input.encode() if isinstance(input, str) else input
        uploads: list[str] = []
        limit = _LINE_BYTES if self._service is None else _SERVICE_LINE_BYTES
        around: dict[str, Any] = {"cwd": cwd, "env": env, "posix": self._service is not None}
        if self._service is None:
            around["user"] = user
        if stdin is not None and len(stdin) > limit:
            uploads.append(await self._upload(stdin))
            line = line_of(cmd, **around, stdin_path=uploads[0])
        else:
            line = line_of(cmd, **around, stdin=stdin)
        if len(line.encode()) > 2 * limit:
            uploads.append(await self._upload(line.encode()))
            line = f". {uploads[-1]}"
        try:
            result = await self._run(line, timeout_s=timeout, user=user)
        except UnreachableError as error:
            raise SandboxUnavailableError(str(error)) from error
        for path in uploads:
            await self._rollout.remove(self._outside(path))
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
        path = await self._path(self._scripts.get(file, file), _WRITTEN)
        try:
            await self._rollout.write(path, contents)
        except ForkpointError as error:
            raise _ERRORS.get(error.status, RuntimeError)(f"{file}: {error.detail}") from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file as text or bytes."""
        path = await self._path(file, _READ)
        try:
            result = await self._rollout.read(path)
        except ForkpointError as error:
            if error.status == 413:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
            raise _ERRORS.get(error.status, RuntimeError)(f"{file}: {error.detail}") from error
        if result.media_type == "application/json":
            raise IsADirectoryError(f"{file} is a directory")
        if len(result.content) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return result.content.decode() if text else result.content

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Refuse: what a person types in a terminal is no call, so it cannot be a part of the rollout."""
        del user
        task, name = self._rollout.task_name, self._rollout.name
        raise NotImplementedError(
            "A terminal in a sandbox of Forkpoint changes a fork of it, and never the sample's own sandbox. "
            f"`forkpoint rollout {task} {name}` shows the rollout's node, and `forkpoint shell {task} NODE` opens a "
            "terminal in a fork of that node."
        )

    async def _run(self, line: str, *, timeout_s: int | None = None, user: str | None = None) -> ShellResult:
        """Run a line in the main container, whose user is part of the line, or in the service."""
        if self._service is None:
            return await self._rollout.exec(line, timeout_s=timeout_s)
        return await self._rollout.exec(line, timeout_s=timeout_s, service=self._service, user=user)

    async def _path(self, file: str, script: str) -> str:
        """Return a file's path for the client; a relative one is below the working directory.

        A service's file is looked up in the service, as its user: in the main container, links would lead elsewhere.
        """
        if self._service is not None:
            result = await self._run(line_of(["/bin/sh", "-c", script, "sh", file]))
            if result.exit_code:
                _raise_for(file, result)
            return self._outside(result.stdout.removesuffix("\n"))
        if file.startswith("/"):
            return file
        if not self._home:
            self._home = (await self._rollout.exec("pwd")).stdout.removesuffix("\n")
        return f"{self._home}/{file}"

    async def _upload(self, content: bytes) -> str:
        """Write what one command needs; return its path in the sandbox."""
        path = _named_by(content) if self._service is None else f"/{Path(_named_by(content)).name}"
        await self._rollout.write(self._outside(path), content)
        return path

    def _outside(self, path: str) -> str:
        """Return the path that the client has for an absolute path of this sandbox, which contains no links."""
        return path if self._service is None else f"/.services/{self._service}{path}"


def _named_by(content: bytes) -> str:
    return f"/tmp/.forkpoint-{sha256(content).hexdigest()[:16]}"  # noqa: S108 - in the sandbox


_ERRORS: dict[int, type[Exception]] = {404: FileNotFoundError, 409: IsADirectoryError}
"""What Inspect's tools expect for the proxy's statuses."""
_BEGIN = 'case $1 in /*) p=$1;; *) p=./$1;; esac\n[ ! -d "$p" ] || exit 71\n'
_END = '\nreadlink -f "$p"'
_READ = f"""{_BEGIN}[ -e "$p" ] || exit 72
[ -f "$p" ] || exit 73
[ -r "$p" ] || exit 74{_END}"""
"""Prints the path of a service's file without links, if the service's user may read it."""
_WRITTEN = f"""{_BEGIN}[ ! -e "$p" ] || [ -f "$p" ] || exit 73
d=${{p%/*}}
[ -d "$d/" ] || mkdir -p "$d" || exit 74
true >>"$p" || exit 74{_END}"""
"""Does the same for a file that the service's user may write; creates it if it is missing."""
_REASONS: dict[int, tuple[type[Exception], str]] = {
    71: (IsADirectoryError, "is a directory"), 72: (FileNotFoundError, "does not exist in the service"),
    73: (RuntimeError, "is a device, pipe or socket"), 74: (PermissionError, "permission denied"),
}  # fmt: skip
"""What the exit codes of these scripts mean."""


def _raise_for(file: str, result: ShellResult) -> NoReturn:
    kind, reason = _REASONS.get(result.exit_code, (RuntimeError, "cannot be looked up in the service"))
    raise kind(f"{file} {reason}. {result.stderr}".rstrip())


def _config(config: BaseModel | str | None) -> ForkpointConfig:
    if isinstance(config, ForkpointConfig):
        return config
    if isinstance(config, str):
        name = Path(config).name
        if name.endswith((".yaml", ".yml")):
            return _composed(yaml.safe_load(Path(config).read_text()), name, Path(config).parent)
        if "Dockerfile" in name:
            builder = ImageBuilder(Path(config).parent, confined=False)
            return ForkpointConfig(spec={"image": builder({"context": ".", "dockerfile": name})})
        return ForkpointConfig(spec=json.loads(Path(config).read_text()))
    if config is None:
        return ForkpointConfig()
    # Inspect reads compose files for logs and for samples, as objects of its own.
    if hasattr(config, "services"):
        return _composed(config.model_dump(by_alias=True, exclude_none=True), "The compose file")
    raise TypeError(f"the sandbox's configuration is a ForkpointConfig or the name of a file, not {config!r}")


def _composed(file: Any, name: str, folder: Path | None = None) -> ForkpointConfig:
    """Return the environment of a compose file, whose paths begin here, as in Inspect. Raises ValueError."""
    folder = folder or Path.cwd()
    try:
        default = default_of(file)
        # Contexts of evaluations are often beside the directory of the file. Who runs them has installed their code.
        build = ImageBuilder(folder, confined=False)
        spec = spec_of(file, None, default, folder=folder, build=build, note=_log.warning)
        return ForkpointConfig(spec=spec, default=default)
    except ComposeFileError as error:
        raise ValueError(f"{name} cannot be a sandbox of Forkpoint: {error}") from error
