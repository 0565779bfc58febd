"""Responses of Docker's Engine API: about the engine, images, containers and exec instances (pure)."""

import datetime as dt
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from proxy.compat.docker.containers import Container, Exec
from proxy.compat.docker.mounts import mounts_of
from proxy.compat.docker.requests import API, ENGINE, OLDEST_API, image_id
from proxy.dialects.base import Local
from sandboxes.listener import Headers
from sandboxes.process_output import END, Frames, ending, frames

NEVER = "0001-01-01T00:00:00Z"
"""The zero value of Go's time, which Docker shows for what has not happened yet."""
_JSON = (("content-type", "application/json"),)
_ABOUT = (("api-version", f"{API[0]}.{API[1]}"), ("docker-experimental", "false"), ("ostype", "linux"),
          ("server", f"Docker/{ENGINE} (forkpoint)"))  # fmt: skip
"""Headers that describe the engine; clients negotiate the version of the API with them."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Local:
    """Return a response with a JSON body."""
    return Local(status, orjson.dumps(value) + b"\n", (*_JSON, *headers))


def error_response(status: int, message: str) -> Local:
    """Return an error response."""
    return json_response({"message": message}, status)


def ping(method: str) -> Local:
    """Return the response to a ping."""
    headers = (("content-type", "text/plain; charset=utf-8"), ("cache-control", "no-cache, no-store"), *_ABOUT)
    return Local(200, b"" if method == "HEAD" else b"OK", headers)


def version() -> Local:
    """Return the description of the engine's version."""
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
    return json_response({"Platform": {"Name": "Forkpoint"}, "Components": [component], **about}, headers=_ABOUT)


def info(containers: Sequence[Container]) -> Local:
    """Return the description of the system, with the containers that the URL shows."""
    running = sum(container.is_running for container in containers)
    return json_response({
        "ID": "forkpoint", "Name": "forkpoint", "ServerVersion": ENGINE, "OSType": "linux",
        "Containers": len(containers), "ContainersRunning": running, "ContainersPaused": 0,
        "ContainersStopped": len(containers) - running, "Images": 0, "Driver": "forkpoint",
        "OperatingSystem": "Forkpoint", "Architecture": platform.machine(), "KernelVersion": platform.release(),
        "NCPU": 1, "MemTotal": 0, "SecurityOptions": [], "Warnings": None, "IndexServerAddress": "", "Labels": [],
        "RegistryConfig": {"InsecureRegistryCIDRs": [], "IndexConfigs": {}, "Mirrors": []}, "Plugins": {},
        "Swarm": {"LocalNodeState": "inactive"}, "DefaultRuntime": "forkpoint", "Runtimes": {}, "CgroupDriver": "none",
    })  # fmt: skip


def image(name: str, config: Mapping[str, Any]) -> Local:
    """Return the description of an image. `config` is what Docker knows of it; empty if no sandbox is made from it."""
    return json_response({
        "Id": config.get("Id") or image_id(name), "RepoTags": [_tagged(name)], "RepoDigests": [], "Parent": "",
        "Comment": "",
        "Created": NEVER,
        "Config": {key: value for key, value in config.items() if key != "Id"}, "Os": "linux",
        "Architecture": _MACHINES.get(platform.machine(), platform.machine()), "Size": 0, "VirtualSize": 0,
        "RootFS": {"Type": "layers", "Layers": []}, "GraphDriver": {"Name": "forkpoint", "Data": {}}, "Metadata": {},
    })  # fmt: skip


def image_entry(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image's entry in a list of images; the arguments are those of `image`."""
    return {
        "Id": config.get("Id") or image_id(name), "ParentId": "", "RepoTags": [_tagged(name)], "RepoDigests": [],
        "Created": 0, "Size": 0, "VirtualSize": 0, "SharedSize": -1, "Labels": config.get("Labels"), "Containers": -1,
    }  # fmt: skip


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def pulled(name: str) -> Local:
    """Return the response to a pull of an image that exists already."""
    line = orjson.dumps({"status": f"Status: Image is up to date for {name}"})
    return Local(200, line + b"\r\n", _JSON)


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 as Docker writes it; 0 stands for never."""
    if not seconds:
        return NEVER
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def container_details(container: Container, network_ids: Mapping[str, str]) -> Local:
    """Return the full description of a container. The networks' IDs are by name."""
    body, running = container.spec.body, container.is_running
    # Path and Args show the request's command, also if it is never executed.
    argv = [*_as_list(body.get("Entrypoint")), *_as_list(body.get("Cmd"))] or [""]
    requested = {name: value for name, value in body.items() if name not in {"HostConfig", "NetworkingConfig"}}
    config = {
        "Hostname": "sandbox", "Labels": {}, "Env": [], "Cmd": None, "Entrypoint": None, "WorkingDir": "", "User": "",
        "Tty": False, "OpenStdin": False, **{name: value for name, value in requested.items() if value is not None},
    }  # fmt: skip
    state = {
        "Status": container.state, "Running": running, "Paused": False, "Restarting": False, "OOMKilled": False,
        "Dead": False, "Pid": 1 if running else 0, "ExitCode": container.exit_code, "Error": container.lost,
        "StartedAt": timestamp(container.started_at), "FinishedAt": timestamp(container.finished_at),
    }  # fmt: skip
    test = (body.get("Healthcheck") or {}).get("Test") or ["NONE"]
    if container.project and test[0] != "NONE":
        # No call meets a service that is not ready, so to clients a started one is healthy.
        state["Health"] = {"Status": "healthy" if running else "starting", "FailingStreak": 0, "Log": []}
    running_execs = [instance.id for instance in container.execs.values() if instance.is_running]
    host = {"NetworkMode": "none", "AutoRemove": False, **(body.get("HostConfig") or {})}
    # Docker's SDK reads logs only if it knows that the logging driver keeps them.
    host["LogConfig"] = {"Type": "json-file", "Config": {}}
    return json_response({
        "Id": container.id, "Name": f"/{container.name}", "Created": timestamp(container.created_at), "State": state,
        "Path": argv[0], "Args": argv[1:], "Image": container.spec.image_id, "Config": config,
        "HostConfig": host,
        "NetworkSettings": {"Networks": _endpoints(container, network_ids), "Ports": {}, "IPAddress": ""},
        "Mounts": _mounts(container) if container.project else [], "RestartCount": 0,
        "Driver": "forkpoint", "Platform": "linux", "ExecIDs": running_execs or None,
        "GraphDriver": {"Name": "forkpoint", "Data": {}}, "LogPath": "", "ResolvConfPath": "",
    })  # fmt: skip


def _endpoints(container: Container, network_ids: Mapping[str, str]) -> dict[str, Any]:
    """Return what a container is on each network: all names stand for the sandbox's loopback."""
    address = "127.0.0.1" if container.is_running else ""
    return {
        name: {
            "NetworkID": network_ids.get(name, ""), "EndpointID": "", "Gateway": "", "MacAddress": "", "Links": None,
            "IPAddress": address, "IPPrefixLen": 8, "IPAMConfig": (settings or {}).get("IPAMConfig"),
            "Aliases": [*((settings or {}).get("Aliases") or ()), container.id[:12]],
        }
        for name, settings in container.networks.items()
    }  # fmt: skip


def _mounts(container: Container) -> list[dict[str, Any]]:
    body = container.spec.body
    return [
        {"Type": "volume", "Name": name, "Source": "", "Destination": path, "Driver": "local", "Mode": "rw", "RW": True}
        for name, path in mounts_of(body.get("HostConfig") or {}).volumes
    ]


def _as_list(arguments: Any) -> list[str]:
    return [arguments] if isinstance(arguments, str) else list(arguments or [])


def container_list(containers: Sequence[Container], now: float, network_ids: Mapping[str, str]) -> Local:
    """Return a list of containers, the newest first, at a time in seconds since 1970. The networks' IDs are by name."""
    ordered = sorted(containers, key=lambda container: container.created_at, reverse=True)
    return json_response([_summary(container, now, network_ids) for container in ordered])


def _summary(container: Container, now: float, network_ids: Mapping[str, str]) -> dict[str, Any]:
    spec, body = container.spec, container.spec.body
    up_s, exited_s = int(now - (container.started_at or container.created_at)), int(now - container.finished_at)
    status = {"running": f"Up {up_s} seconds", "created": "Created"}.get(
        container.state, f"Exited ({container.exit_code}) {exited_s} seconds ago"
    )
    return {
        "Id": container.id, "Names": [f"/{container.name}"], "Image": spec.image, "ImageID": spec.image_id,
        "Command": " ".join([*_as_list(body.get("Entrypoint")), *_as_list(body.get("Cmd"))]),
        "Created": int(container.created_at), "Ports": [], "Labels": body.get("Labels") or {},
        "State": container.state, "Status": status, "HostConfig": {"NetworkMode": "none"},
        "NetworkSettings": {"Networks": _endpoints(container, network_ids)}, "Mounts": [],
    }  # fmt: skip


def has_label(labels: Mapping[str, str], wanted: str) -> bool:
    """Return whether labels have `NAME` or `NAME=VALUE`."""
    name, equals, value = wanted.partition("=")
    return name in labels and (not equals or labels[name] == value)


def passes(filters: Mapping[str, Sequence[str]], checks: Mapping[str, Callable[[str], bool]]) -> bool:
    """Return whether an entry passes a list's filters; only those of `checks` are looked at."""
    for name, check in checks.items():
        values = list(filters.get(name) or ())
        # Docker's rule: an entry must have all labels, but only one of several names or states.
        combine = all if name == "label" else any
        if values and not combine(check(value) for value in values):
            return False
    return True


def matches(container: Container, filters: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a container passes a list's filters."""
    labels = container.spec.body.get("Labels") or {}
    checks: dict[str, Callable[[str], bool]] = {
        "id": container.id.startswith,
        "name": lambda value: value.removeprefix("/").strip("^$") in container.name,
        "status": lambda value: container.state == value,
        "ancestor": lambda value: container.spec.image.partition(":")[0] == value.partition(":")[0],
        "label": lambda value: has_label(labels, value),
        "network": lambda value: value in container.networks,
    }
    return passes(filters, checks)


def exec_details(instance: Exec) -> Local:
    """Return the description of an exec instance."""
    spec = instance.spec
    process = {"tty": spec.tty, "entrypoint": spec.argv[0], "arguments": list(spec.argv[1:]), "privileged": False}
    view = {
        "ID": instance.id, "Running": instance.is_running, "ExitCode": instance.exit_code, "ProcessConfig": process,
        "OpenStdin": spec.stdin, "OpenStdout": 1 in spec.streams, "OpenStderr": 2 in spec.streams,
        "CanRemove": False, "ContainerID": instance.container.id, "DetachKeys": instance.detach_keys,
        "Pid": 1 if instance.is_running else 0,
    }  # fmt: skip
    return json_response(view, headers=instance.marks)


def tail(body: bytes, count: str) -> bytes:
    """Return a recorded result with the last lines of its output only; a count such as `all` keeps every line."""
    if not body or not count.isdigit():
        return body
    lines = [(kind, line) for kind, data in frames(body) if kind != END for line in data.splitlines(keepends=True)]
    kept = Frames(len(body))
    for kind, line in lines[max(0, len(lines) - int(count)) :]:
        kept.add(kind, line)
    return kept.end(ending(body).exit_code)


def process_table(output: str) -> Local:
    """Return the output of `ps` as a table. The last column takes the rest of its line, because it has spaces."""
    lines = [line for line in output.splitlines() if line.strip()]
    titles = lines[0].split() if lines else []
    return json_response({"Titles": titles, "Processes": [line.split(None, len(titles) - 1) for line in lines[1:]]})
