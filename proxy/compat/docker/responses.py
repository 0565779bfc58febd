"""What Forkpoint tells Docker's clients of itself, of images, containers and exec instances (pure)."""

import datetime as dt
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.compat.docker.requests import API, ENGINE, OLDEST_API, Created, ExecSpec, image_id
from proxy.dialects.base import Local
from sandboxes.listener import Headers
from sandboxes.process_output import END, Frames, ending, frames

NEVER = "0001-01-01T00:00:00Z"
_JSON = (("content-type", "application/json"),)
_ABOUT = (("api-version", f"{API[0]}.{API[1]}"), ("docker-experimental", "false"), ("ostype", "linux"),
          ("server", f"Docker/{ENGINE} (forkpoint)"))  # fmt: skip
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(slots=True)
class Container:
    """A container as its clients see it. rollout: its name; owner: the rollout that the URL named, if it did.

    state: "created", "running" or "exited". times are seconds since 1970.
    """

    id: str
    name: str
    task: str
    owner: str
    rollout: str
    made: Created
    created_at: float
    state: str = "created"
    exit_code: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0
    execs: dict[str, "Exec"] = field(default_factory=dict)


@dataclass(slots=True)
class Exec:
    """An exec instance. exit_code: None until it has ended. started: whether it has been, for it runs once."""

    id: str
    container: Container
    execution: ExecSpec
    detach_keys: str = ""
    started: bool = False
    running: bool = False
    exit_code: int | None = None


def told(value: Any, status: int = 200, headers: Headers = ()) -> Local:
    """Return a value as JSON."""
    return Local(status, orjson.dumps(value) + b"\n", (*_JSON, *headers))


def fault(status: int, message: str) -> Local:
    """Return an error in Docker's form."""
    return told({"message": message}, status)


def ping(method: str) -> Local:
    """Say that the engine answers."""
    headers = (("content-type", "text/plain; charset=utf-8"), ("cache-control", "no-cache, no-store"), *_ABOUT)
    return Local(200, b"" if method == "HEAD" else b"OK", headers)


def version() -> Local:
    """Say which engine this is."""
    about = {
        "Version": ENGINE, "ApiVersion": f"{API[0]}.{API[1]}", "MinAPIVersion": f"{OLDEST_API[0]}.{OLDEST_API[1]}",
        "Os": "linux", "Arch": _MACHINES.get(platform.machine(), platform.machine()), "GitCommit": "forkpoint",
        "KernelVersion": platform.release(), "BuildTime": "", "GoVersion": "",
    }  # fmt: skip
    component = {
        "Name": "Engine",
        "Version": ENGINE,
        "Details": {name: value for name, value in about.items() if value},
    }
    return told({"Platform": {"Name": "Forkpoint"}, "Components": [component], **about}, headers=_ABOUT)


def info(containers: Sequence[Container]) -> Local:
    """Say what there is."""
    states = [container.state for container in containers]
    return told({
        "ID": "forkpoint", "Name": "forkpoint", "ServerVersion": ENGINE, "OSType": "linux",
        "Containers": len(states), "ContainersRunning": states.count("running"), "ContainersPaused": 0,
        "ContainersStopped": len(states) - states.count("running"), "Images": 0, "Driver": "forkpoint",
        "OperatingSystem": "Forkpoint", "Architecture": platform.machine(), "KernelVersion": platform.release(),
        "NCPU": 1, "MemTotal": 0, "SecurityOptions": [], "Warnings": None, "IndexServerAddress": "", "Labels": [],
        "RegistryConfig": {"InsecureRegistryCIDRs": [], "IndexConfigs": {}, "Mirrors": []}, "Plugins": {},
        "Swarm": {"LocalNodeState": "inactive"}, "DefaultRuntime": "forkpoint", "Runtimes": {}, "CgroupDriver": "none",
    })  # fmt: skip


def image(name: str, config: Mapping[str, Any]) -> Local:
    """Tell of an image; config: what Docker says of it where a container is made of it, nothing elsewhere."""
    number = config.get("Id") or image_id(name)
    tag = name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"
    return told({
        "Id": number, "RepoTags": [tag], "RepoDigests": [], "Parent": "", "Comment": "", "Created": NEVER,
        "Config": {word: value for word, value in config.items() if word != "Id"}, "Os": "linux",
        "Architecture": _MACHINES.get(platform.machine(), platform.machine()), "Size": 0, "VirtualSize": 0,
        "RootFS": {"Type": "layers", "Layers": []}, "GraphDriver": {"Name": "forkpoint", "Data": {}}, "Metadata": {},
    })  # fmt: skip


def pulled(name: str) -> Local:
    """Say that an image is there: nothing is pulled."""
    line = orjson.dumps({"status": f"Status: Image is up to date for {name}"})
    return Local(200, line + b"\r\n", _JSON)


def when(seconds: float) -> str:
    """Return a time as Docker writes one."""
    if not seconds:
        return NEVER
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def inspected(container: Container) -> Local:
    """Tell all of a container."""
    body, running = container.made.body, container.state == "running"
    argv = [*_listed(body.get("Entrypoint")), *_listed(body.get("Cmd"))] or [""]
    asked = {name: value for name, value in body.items() if name not in {"HostConfig", "NetworkingConfig"}}
    config = {
        "Hostname": "sandbox", "Labels": {}, "Env": [], "Cmd": None, "Entrypoint": None, "WorkingDir": "", "User": "",
        "Tty": False, "OpenStdin": False, **{name: value for name, value in asked.items() if value is not None},
    }  # fmt: skip
    state = {
        "Status": container.state, "Running": running, "Paused": False, "Restarting": False, "OOMKilled": False,
        "Dead": False, "Pid": 1 if running else 0, "ExitCode": container.exit_code, "Error": "",
        "StartedAt": when(container.started_at), "FinishedAt": when(container.finished_at),
    }  # fmt: skip
    running_execs = [one.id for one in container.execs.values() if one.running]
    host = {"NetworkMode": "none", "AutoRemove": False, **(body.get("HostConfig") or {})}
    # The SDK reads logs only of drivers that it knows to keep them.
    host["LogConfig"] = {"Type": "json-file", "Config": {}}
    return told({
        "Id": container.id, "Name": f"/{container.name}", "Created": when(container.created_at), "State": state,
        "Path": argv[0], "Args": argv[1:], "Image": container.made.image_id, "Config": config,
        "HostConfig": host,
        "NetworkSettings": {"Networks": {}, "Ports": {}, "IPAddress": ""}, "Mounts": [], "RestartCount": 0,
        "Driver": "forkpoint", "Platform": "linux", "ExecIDs": running_execs or None,
        "GraphDriver": {"Name": "forkpoint", "Data": {}}, "LogPath": "", "ResolvConfPath": "",
    })  # fmt: skip


def _listed(words: Any) -> list[str]:
    return [words] if isinstance(words, str) else list(words or [])


def listed(containers: Sequence[Container], now: float) -> Local:
    """Tell of several containers, the newest first."""
    ordered = sorted(containers, key=lambda container: container.created_at, reverse=True)
    return told([_line(container, now) for container in ordered])


def _line(container: Container, now: float) -> dict[str, Any]:
    body, made = container.made.body, container.made
    since = int(now - (container.started_at or container.created_at))
    status = {"running": f"Up {since} seconds", "created": "Created"}.get(
        container.state, f"Exited ({container.exit_code}) {int(now - container.finished_at)} seconds ago"
    )
    return {
        "Id": container.id, "Names": [f"/{container.name}"], "Image": made.image, "ImageID": made.image_id,
        "Command": " ".join([*_listed(body.get("Entrypoint")), *_listed(body.get("Cmd"))]),
        "Created": int(container.created_at), "Ports": [], "Labels": body.get("Labels") or {},
        "State": container.state, "Status": status, "HostConfig": {"NetworkMode": "none"},
        "NetworkSettings": {"Networks": {}}, "Mounts": [],
    }  # fmt: skip


def fits(container: Container, filters: Mapping[str, Sequence[str]]) -> bool:
    """Whether a container is among those that a list's filters leave: by id, name, label, status and image.

    Those that Forkpoint does not know leave it there.
    """
    labels = container.made.body.get("Labels") or {}
    checks: dict[str, Callable[[str], bool]] = {
        "id": container.id.startswith,
        "name": lambda value: value.removeprefix("/").strip("^$") in container.name,
        "status": lambda value: container.state == value,
        "ancestor": lambda value: container.made.image.partition(":")[0] == value.partition(":")[0],
        "label": lambda value: (
            value.partition("=")[0] in labels
            and ("=" not in value or labels[value.partition("=")[0]] == value.partition("=")[2])
        ),
    }
    for name, check in checks.items():
        values = list(filters.get(name) or ())
        together = all if name == "label" else any
        if values and not together(check(value) for value in values):
            return False
    return True


def execution_inspected(one: Exec) -> Local:
    """Tell of an exec instance."""
    execution = one.execution
    process = {
        "tty": execution.tty, "entrypoint": execution.argv[0], "arguments": list(execution.argv[1:]),
        "privileged": False,
    }  # fmt: skip
    return told({
        "ID": one.id, "Running": one.running, "ExitCode": one.exit_code, "ProcessConfig": process,
        "OpenStdin": execution.stdin, "OpenStdout": 1 in execution.streams, "OpenStderr": 2 in execution.streams,
        "CanRemove": False, "ContainerID": one.container.id, "DetachKeys": one.detach_keys,
        "Pid": 1 if one.running else 0,
    })  # fmt: skip


def tail(body: bytes, wanted: str) -> bytes:
    """Return a main command's answer without all but its last lines; wanted: how many, "all" for all of them."""
    if not body or not wanted.isdigit():
        return body
    lines = [(kind, line) for kind, data in frames(body) if kind != END for line in data.splitlines(keepends=True)]
    kept = Frames(len(body))
    for kind, line in lines[len(lines) - int(wanted) if int(wanted) <= len(lines) else 0 :]:
        kept.add(kind, line)
    return kept.end(ending(body).exit_code)


def topped(out: str) -> Local:
    """Tell what `ps` told: the last column takes the rest of its line."""
    lines = [line for line in out.splitlines() if line.strip()]
    titles = lines[0].split() if lines else []
    return told({"Titles": titles, "Processes": [line.split(None, len(titles) - 1) for line in lines[1:]]})
