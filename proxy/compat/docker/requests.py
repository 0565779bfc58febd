"""Reads requests of Docker's Engine API, and builds the calls that they make (pure).

Calls are execs, copies, and a main command that does more than wait. The key of a command consists of its arguments,
variables, directory, user, terminal and stdin. Ids, names and labels are in no key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson

from proxy.compat.docker.mounts import mounts_of
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from sandboxes.calls import ToolCall
from sandboxes.images.waiting_commands import waits
from sandboxes.tool_clients.json_text import parse_json

API, OLDEST_API = (1, 44), (1, 24)
"""Newest and oldest version of the Engine API that are served, major and minor."""
ENGINE = "25.0.5"
"""The engine's announced version: new enough for today's clients, without features that are missing here."""
_VERSION = re.compile(r"v(\d{1,3})\.(\d{1,3})")
"""The first segment of a path that names a version of the API."""
_NAME = re.compile(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class DockerRequest:
    """A request below the endpoint."""

    method: str
    segments: tuple[str, ...]  # Decoded, without the version of the API.
    query: Mapping[str, str]
    body: bytes

    def flag(self, name: str) -> bool:
        """Return whether a boolean of the query is set, by Docker's rules."""
        return self.query.get(name, "").strip().lower() not in {"", "0", "no", "false", "none"}

    def json(self) -> dict[str, Any]:
        """Return the body's JSON object; an empty body is an empty one. Raises RefusalError (400) for other values."""
        if not self.body.strip():
            return {}
        try:
            value = parse_json(self.body)
        except orjson.JSONDecodeError as error:
            raise RefusalError(400, "docker", f"invalid JSON: {error}") from None
        if not isinstance(value, dict):
            raise RefusalError(400, "docker", "invalid JSON: the body must be an object")
        return value

    def filters(self) -> dict[str, list[str]]:
        """Return the filters of a listing, by name. Raises RefusalError (400) if they are no JSON object."""
        try:
            filters = orjson.loads(self.query.get("filters") or b"{}")
        except orjson.JSONDecodeError:
            raise RefusalError(400, "docker", "invalid filter") from None
        if not isinstance(filters, dict):
            raise RefusalError(400, "docker", "invalid filter")
        # Older clients send {"label": {"a": true}}, newer ones {"label": ["a"]}.
        return {name: list(map(str, values)) for name, values in filters.items() if isinstance(values, list | dict)}


def read(method: str, path: str, query: str, body: bytes) -> DockerRequest:
    """Parse a request by its path below the endpoint. Raises RefusalError (400) for a version that is not served."""
    segments = [unquote(segment) for segment in path.split("/") if segment]
    if segments and (match := _VERSION.fullmatch(segments[0])):
        segments = segments[1:]
        version = (int(match[1]), int(match[2]))
        if version > API:
            raise RefusalError(
                400, "docker", f"client version {_dotted(version)} is too new. Maximum supported API version is "
                f"{_dotted(API)}",
            )  # fmt: skip
        if version < OLDEST_API:
            raise RefusalError(
                400, "docker", f"client version {_dotted(version)} is too old. Minimum supported API version is "
                f"{_dotted(OLDEST_API)}, please upgrade your client to a newer version",
            )  # fmt: skip
    return DockerRequest(method, tuple(segments), dict(parse_qsl(query, keep_blank_values=True)), body)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


NO_PAGE = RefusalError(404, "docker", "page not found")
"""Docker's answer to a path that it does not know."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a create request says about its container."""

    image: str  # As the client named it.
    image_id: str  # Does not change when the name does.
    main: tuple[str, ...]  # The arguments of the main command; empty if that would only wait.
    user: str  # The user of its processes; empty for the image's own.
    tty: bool  # The main command runs on a terminal.
    stdin: bool  # The main command reads stdin.
    auto_remove: bool  # Remove the container when it exits.
    background: bool  # `main` is an entrypoint before a command that only waits. It is started in the background.
    body: dict[str, Any]  # The request's body, which the client sees again when it inspects the container.


def name_of(query: Mapping[str, str]) -> str:
    """Return the name in a create request; empty if there is none. Raises RefusalError (400) if it is invalid."""
    name = query.get("name", "")
    if name and _NAME.fullmatch(name) is None:
        raise RefusalError(
            400, "docker", f"Invalid container name ({name[:100]}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed"
        )
    return name.removeprefix("/")


def container_spec(body: dict[str, Any], config: Mapping[str, Any], *, in_project: bool = False) -> ContainerSpec:
    """Parse a create request, with the image's defaults. Raises RefusalError (400) for what Forkpoint does not have."""
    image = body.get("Image")
    if not isinstance(image, str) or not image:
        raise RefusalError(400, "docker", "config cannot be empty in order to create a container: name an Image")
    host = body.get("HostConfig") or {}
    _refuse(host, body, in_project=in_project)
    argv = arguments_of(body, config)
    stdin, tty = bool(body.get("OpenStdin")), bool(body.get("Tty"))
    # With stdin attached the command has input to read. On a terminal, or detached, it would wait for a person.
    has_input = bool(body.get("AttachStdin")) and not tty
    main = () if waits(argv, interactive=(stdin or tty) and not has_input) else argv
    return ContainerSpec(
        image=image, image_id=str(config.get("Id") or image_id(image)), main=main, user=str(body.get("User") or ""),
        tty=tty, stdin=stdin, auto_remove=bool(host.get("AutoRemove")),
        background=bool(main) and not in_project and _has_waiting_command(body, config), body=body,
    )  # fmt: skip


def arguments_of(body: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments of a container's main command: entrypoint and command of the request, else of its image."""
    entrypoint, command = _entrypoint_and_command(body, config)
    # Docker's clients send [""] to clear an entrypoint or a command.
    return tuple(argument for argument in (*entrypoint, *command) if argument or len(entrypoint) + len(command) > 1)


def _has_waiting_command(body: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the main command is an entrypoint before a command that only waits."""
    entrypoint, command = _entrypoint_and_command(body, config)
    return bool(entrypoint and command) and waits(tuple(command), interactive=False)


def _entrypoint_and_command(body: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    command, entrypoint = _arguments(body, "Cmd"), _arguments(body, "Entrypoint")
    if entrypoint is None:
        entrypoint = _arguments(config, "Entrypoint") or []
        # As in Docker, an entrypoint in the request also discards the image's command.
        command = _arguments(config, "Cmd") if command is None else command
    return entrypoint, command or []


def image_id(name: str) -> str:
    """Return an ID for an image of which only the name is known."""
    return name if name.startswith("sha256:") else f"sha256:{sha256(name.encode()).hexdigest()}"


def _arguments(body: Mapping[str, Any], name: str) -> list[str] | None:
    value = body.get(name)
    if value is None:
        return None
    arguments = [value] if isinstance(value, str) else value
    if not (isinstance(arguments, list) and all(isinstance(argument, str) for argument in arguments)):
        raise RefusalError(400, "docker", f"{name} must be a list of strings")
    return arguments


_UNSUPPORTED = {
    "VolumesFrom": "has no volumes. Copy files in (docker cp).",
    "Devices": "passes no devices on.",
    "DeviceRequests": "has no GPUs.",
}
"""Members of HostConfig that are refused, and why."""


def _refuse(host: Mapping[str, Any], body: Mapping[str, Any], *, in_project: bool) -> None:
    for name, why in _UNSUPPORTED.items():
        if host.get(name):
            raise RefusalError(400, "docker", f"HostConfig.{name}: Forkpoint {why}")
    if (volumes := mounts_of(host).volumes) and not in_project:
        raise RefusalError(
            400, "docker", f"Volume {volumes[0][0]!r}: Forkpoint has volumes for projects of `docker compose` only, "
            "whose containers are one state.",
        )  # fmt: skip
    if str(host.get("NetworkMode") or "").startswith("container:"):
        raise RefusalError(400, "docker", "HostConfig.NetworkMode: Forkpoint's containers cannot share a network.")
    if not isinstance(body.get("Env") or [], list):
        raise RefusalError(400, "docker", "Env must be a list of strings")


def variables(entries: object) -> dict[str, str]:
    """Return `NAME=value` entries as a mapping. A name without a value is omitted, as Docker unsets it."""
    if entries is None:
        return {}
    if not (isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)):
        raise RefusalError(400, "docker", "Env must be a list of strings")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def environment(body: Mapping[str, Any], config: Mapping[str, Any]) -> EnvironmentRequest:
    """Return the environment that a create request names, with the image's default directory."""
    host = body.get("HostConfig") or {}
    # 0 and negative values mean no limit in Docker; the task's own limits then apply.
    memory, pids = host.get("Memory") or 0, host.get("PidsLimit") or 0
    workdir = body.get("WorkingDir") or config.get("WorkingDir") or None
    return EnvironmentRequest(
        str(body["Image"]), variables(body.get("Env")), workdir,
        memory_mb=max(16, memory >> 20) if memory > 0 else None, pids=max(8, pids) if pids > 0 else None,
        cpus=_cpus(host), setup=mounts_of(host).setup(),
    )  # fmt: skip


def _cpus(host: Mapping[str, Any]) -> float | None:
    """Return the CPUs that a container gets: `cpus` of compose, `--cpus`, or a quota of a period; None for all."""
    if nano := host.get("NanoCpus") or 0:
        return float(nano) / 1e9 if nano > 0 else None
    quota, period = host.get("CpuQuota") or 0, host.get("CpuPeriod") or _PERIOD_US
    return float(quota) / period if quota > 0 else None


_PERIOD_US = 100_000
"""The kernel's period of a CPU quota, which Docker takes if a request names none."""


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """What an exec instance or a main command runs."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # Variables beside the container's own.
    cwd: str | None  # None for the container's own.
    user: str | None  # None for the container's own.
    tty: bool  # The command runs on a terminal.
    stdin: bool  # The command reads stdin.
    streams: frozenset[int]  # The ones that the client wants: stdout (1), stderr (2).
    service: str = ""  # The side service in which the command runs; empty for the main container.

    def call(self, stdin: bytes = b"", *, detach: bool = False) -> ToolCall:
        """Return the call that runs the command with its whole stdin; `detach` does not wait for its end."""
        arguments: dict[str, Any] = {
            "argv": list(self.argv), "env": dict(self.env), "cwd": self.cwd, "user": self.user, "tty": self.tty,
        }  # fmt: skip
        service = {"service": self.service} if self.service else {}
        return ToolCall("process", "run", arguments | service | ({"detach": True} if detach else {}), stdin)


def exec_spec(body: Mapping[str, Any], user: str, service: str = "") -> ExecSpec:
    """Parse a request to create an exec in a container or side service. Raises RefusalError (400) without command."""
    argv = _arguments(body, "Cmd")
    if not argv or not argv[0]:
        raise RefusalError(400, "docker", "No exec command specified")
    env = variables(body.get("Env"))
    if any("\0" in text for text in (*argv, *env.values())):
        raise RefusalError(400, "docker", "A command and its variables must not contain NUL.")
    streams = frozenset(number for number, name in ((1, "AttachStdout"), (2, "AttachStderr")) if body.get(name, False))
    return ExecSpec(
        tuple(argv), env, str(body.get("WorkingDir") or "") or None, str(body.get("User") or "") or user or None,
        bool(body.get("Tty")), bool(body.get("AttachStdin")), streams, service,
    )  # fmt: skip


def main_command(spec: ContainerSpec) -> ExecSpec:
    """Return what runs a container's main command."""
    return ExecSpec(spec.main, {}, None, spec.user or None, spec.tty, spec.stdin, frozenset({1, 2}))


def kill_all() -> ToolCall:
    """Return the call that kills every process of a container, of whichever user, as stopping it does."""
    argv = ["/bin/sh", "-c", "kill -9 -1"]
    return ToolCall("process", "run", {"argv": argv, "env": {}, "cwd": "/", "user": "0", "tty": False})
