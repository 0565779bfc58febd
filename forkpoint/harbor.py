"""An environment provider for Harbor, the harness of Terminal-Bench: `forkpoint.harbor:ForkpointEnvironment`.

A trial's environment is a rollout. Trials of one Harbor task are rollouts of one Forkpoint task, so what an agent
repeats, and what Harbor itself does before and after it, is answered from the tree.
"""

import io
import json
import re
import shlex
import tarfile
from asyncio import to_thread
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from forkpoint.client import AsyncClient, AsyncRollout
from forkpoint.compose_errors import ComposeFileError
from forkpoint.errors import ForkpointError
from forkpoint.model_variables import model_variables
from forkpoint.own_shell import line_of
from forkpoint.results import ShellResult
from forkpoint.task_environment import environment_of

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]+")
"""Matches what names of rollouts and labels do without."""


_VARIABLES = {
    "ENV_AGENT_LOGS_PATH": "/logs/agent", "ENV_VERIFIER_LOGS_PATH": "/logs/verifier",
    "ENV_ARTIFACTS_PATH": "/logs/artifacts", "TEST_DIR": "/tests",
}  # fmt: skip
"""What compose files of tasks mean by the variables that Harbor sets. This machine's variables are not for tasks, whose
files are a stranger's."""


_TABLE = {"build_timeout_sec", "cpus", "docker_image", "gpus", "memory_mb", "os", "storage_mb"}
"""Members of a task's environment that a sandbox has, or that no sandbox can have."""


class ForkpointEnvironment(BaseEnvironment):
    """A rollout of a Forkpoint task as the environment of a trial."""

    def __init__(
        self,
        *args: Any,
        url: str | None = None,
        spec: dict[str, Any] | None = None,
        offline: bool = False,
        labels: dict[str, Any] | None = None,
        harness: bool = False,
        **kwargs: Any,
    ) -> None:
        """Keep what Harbor passes. `start` builds the image, connects, and raises what is wrong: one trial fails then.

        Args:
            args: What Harbor passes.
            url: The proxy's URL; None for FORKPOINT_URL, or the proxy on this machine.
            spec: The environment, as `docs/tasks.md` describes it; None for that of the task: its
                `environment/forkpoint.json`, else its `docker-compose.yaml`, else its `docker_image` or `Dockerfile`.
            offline: Whether a task that may use the network is run without one.
            labels: Labels of the rollout, such as `run`.
            harness: Whether agents run inside the sandbox (`docs/agents/harness.md`): a command whose variables name
                the URL of a model is then one, and only its requests to that model leave the sandbox.
            kwargs: What else Harbor passes.
        """
        self._url, self._spec, self._offline = url, spec, offline
        self._labels, self._harness = labels or {}, harness
        self._client: AsyncClient | None = None
        self._begun: AsyncRollout | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return the provider's name."""
        return "forkpoint"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What the environment can do: nothing in a sandbox reaches the network, and services are part of it."""
        return EnvironmentCapabilities(disable_internet=True, docker_compose=True)

    def _validate_definition(self) -> None:
        """Check nothing yet: an error in the constructor would end the job with all its other trials."""

    def _environment(self, *, force_build: bool) -> dict[str, Any]:
        """Return the spec of the task. Raises ValueError if no sandbox can be its environment."""
        if self.network_policy.network_mode == NetworkMode.PUBLIC and not self._offline:
            raise ValueError(
                "This task may use the network, and Forkpoint's sandboxes have none. If the task works without, pass "
                "--environment-kwarg offline=true."
            )
        if self.extra_docker_compose_paths:
            raise ValueError("Forkpoint has no --extra-docker-compose. Write its members into docker-compose.yaml.")
        if self._spec is not None:
            return self._spec
        try:
            table = self.task_env_config.model_dump(include=_TABLE, mode="json")
            return environment_of(
                self.environment_dir, table, variables=_VARIABLES, force_build=force_build, note=self.logger.warning
            )
        except ComposeFileError as error:
            raise ValueError(
                f"The environment of this task cannot be a sandbox: {error} Or pass a spec (docs/tasks.md): "
                '--environment-kwarg spec=\'{"image": "NAME"}\'.'
            ) from error

    async def start(self, force_build: bool) -> None:
        """Begin the trial's rollout, and upload the task's files."""
        spec = await to_thread(self._environment, force_build=force_build)
        if self._harness:
            spec = {"harness": {}, **spec}
        digest = sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:8]
        self._client = AsyncClient(self._url)
        task = self._client.task(f"{_named(self.environment_name)}-{digest}")
        await task.put(spec)
        labels = {"harbor": _named(self.environment_name), **self._labels}
        # A trial that is resumed has the same session, but begins again.
        self._begun = task.rollout(f"{_named(self.session_id)}-{uuid4().hex[:8]}", labels=labels)
        await self._begun.begin()
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Finish the rollout, unless it is to stay; its records stay anyway."""
        if self._begun is not None and delete:
            with suppress(ForkpointError):
                await self._begun.finish()
        if self._client is not None:
            await self._client.close()

    @property
    def rollout(self) -> AsyncRollout:
        """The rollout of the trial."""
        assert self._begun is not None, "start comes first"
        return self._begun

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in a shell of its own."""
        name, variables = self._resolve_user(user), self._merge_env(env)
        model = model_variables(variables or {}) if self._harness else None
        line = line_of(
            ["bash", "-c", command],
            cwd=cwd or self.task_env_config.workdir,
            # An agent's variables are the program's own: they differ from trial to trial.
            env=variables if model is None else None,
            user=None if name is None else str(name),
        )
        if model is None:
            result = _finished(await self.rollout.exec(line, timeout_s=timeout_sec), timeout_sec)
        else:
            run = await self.rollout.harness(
                model.upstream, headers=model.headers, command=f"exec bash -c {shlex.quote(line)}", env=model.env
            )
            result = ExecResult(stdout=run.log, stderr="", return_code=run.exit_code)
        callback = self._output_callback()
        if callback is not None and result.stdout:
            await callback(result.stdout, "stdout")
        if callback is not None and result.stderr:
            await callback(result.stderr, "stderr")
        return result

    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in a service of the task's compose file, with the variables and the user of that service."""
        if self.is_main_service(service):
            return await self.exec(command, cwd, env, timeout_sec, user)
        name = None if user is None else str(user)
        line = line_of(["/bin/sh", "-c", command], cwd=cwd, env=env)
        result = await self.rollout.exec(line, timeout_s=timeout_sec, service=service, user=name)
        return _finished(result, timeout_sec)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Write a file with the content and the permissions of a local one."""
        content, mode = await to_thread(_content, Path(source_path))
        await self.rollout.write(target_path, content, mode=mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Unpack a local directory's content in a directory of the sandbox."""
        content = await to_thread(_packed, Path(source_dir))
        # Named by its content, so that equal uploads of other trials are equal calls.
        path = f"/var/tmp/.forkpoint-{sha256(content).hexdigest()[:16]}.tar"  # noqa: S108 - in the sandbox
        await self.rollout.write(path, content)
        await self._as_root('mkdir -p "$1" && tar -xf "$2" -C "$1" && rm "$2"', target_dir, path)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the sandbox."""
        result = await self.rollout.read(source_path)
        await to_thread(_write, Path(target_path), result.content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the content of a directory of the sandbox."""
        await self._download(source_dir, Path(target_dir), [])

    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        """Copy a directory of the sandbox, without what patterns of tar exclude; Harbor's archive has a random name."""
        await self._download(source_dir, Path(target_dir), exclude)

    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        """Copy a file of a service, which needs `cat`."""
        if self.is_main_service(service):
            await self.download_file(source_path, target_path)
            return
        # Through a file in the service's root directory, which no link of the service leads elsewhere.
        copy = f"/.forkpoint-{sha256(source_path.encode()).hexdigest()[:16]}"
        await self._in_service(service, f"cat -- {shlex.quote(source_path)} >{copy}")
        content = (await self.rollout.read(f"/.services/{service}{copy}")).content
        await self.rollout.remove(f"/.services/{service}{copy}")
        await to_thread(_write, Path(target_path), content)

    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        """Copy the content of a directory of a service."""
        await self.service_download_dir_with_exclusions(
            source_dir=source_dir, target_dir=target_dir, exclude=[], service=service
        )

    async def service_download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str], service: str | None = None
    ) -> None:
        """Copy the content of a directory of a service, without what patterns of tar exclude."""
        if not self.is_main_service(service):
            # Without links, because the main container's tar would follow them in its own root directory.
            place = await self._in_service(service, f"cd -- {shlex.quote(source_dir)} && pwd -P")
            source_dir = f"/.services/{service}{place.removesuffix(chr(10))}"
        await self._download(source_dir, Path(target_dir), exclude)

    async def _in_service(self, service: str | None, command: str) -> str:
        """Return what a command of this provider prints in a service, as root."""
        result = await self.rollout.exec(command, service=service, user="root")
        if result.exit_code:
            raise RuntimeError(f"{command!r} failed in service {service!r}: {result.output}")
        return result.stdout

    async def _download(self, source: str, target: Path, exclude: list[str]) -> None:
        path = f"/var/tmp/.forkpoint-{sha256(source.encode()).hexdigest()[:16]}.tar"  # noqa: S108 - in the sandbox
        patterns = [f"--exclude={pattern}" for pattern in exclude]
        await self._as_root('path=$1; shift; tar -cf "$path" "$@" .', path, "-C", source, *patterns)
        content = (await self.rollout.read(path)).content
        await self.rollout.remove(path)
        await to_thread(_unpack, content, target)

    async def _as_root(self, script: str, *arguments: str) -> None:
        """Run a script of this provider, whatever user the agent's commands have."""
        result = await self.rollout.exec(line_of(["/bin/bash", "-c", script, "bash", *arguments]))
        if result.exit_code:
            raise RuntimeError(f"{script!r} failed for {arguments}: {result.output}")


def _finished(result: ShellResult, timeout_s: int | None) -> ExecResult:
    """Return a command's result in Harbor's form; a command that ran out of time raises, as with Docker."""
    if result.timed_out:
        raise RuntimeError(f"Command timed out after {timeout_s} seconds")
    return ExecResult(stdout=result.stdout or None, stderr=result.stderr or None, return_code=result.exit_code)


def _named(text: str) -> str:
    """Return a name for a rollout or a task that Harbor's name of it is recognized in."""
    return _NOT_IN_A_NAME.sub("-", text).strip("-")[-48:]


def _content(source: Path) -> tuple[bytes, str]:
    return source.read_bytes(), f"{source.stat().st_mode & 0o777:o}"


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _packed(source: Path) -> bytes:
    """Return a directory's content as a tar file that is the same whenever the content is."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for child in sorted(source.iterdir()):
            archive.add(child, arcname=child.name, filter=_owned_by_root)
    return packed.getvalue()


def _unpack(content: bytes, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        # The sandbox made the archive. The filter refuses members that would leave the directory.
        archive.extractall(target, filter=transfer_tar_filter)  # noqa: S202


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
