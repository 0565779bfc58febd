"""The services of a compose file as members of a spec.

What a sandbox cannot be is refused, because a task without one of its parts would be another task.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sandboxes.local.service_commands import SERVICES, absolute, is_system, making

MAIN = "main"
"""The main container's name in a spec, and in the compose files of most harnesses."""
_IGNORED = frozenset({
    "container_name", "cpus", "deploy", "expose", "hostname", "init", "labels", "logging", "mem_limit",
    "mem_reservation", "memswap_limit", "networks", "platform", "ports", "pull_policy", "restart", "stdin_open",
    "stop_grace_period", "stop_signal", "tty",
})  # fmt: skip
"""Members that do not change what programs meet: all services share one network, whose ports are all open inside. The
limits of the main service hold for all of them together."""
_LIMITS = frozenset({"cpus", "deploy", "mem_limit"})
"""Members that are read of the main service."""
_MAIN = frozenset({"command", "depends_on", "environment", "image", "volumes", "working_dir"})
"""Members of the main service that have a meaning. Its command only keeps it running."""
_SIDE = _MAIN | {"entrypoint", "healthcheck", "user"}
"""Members of a side service that have a meaning."""
_IDLE = re.compile(r"\b(sleep|tail|cat|wait|infinity)\b|\A(/bin/)?(ba)?sh\Z")
"""Matches commands that only keep a container running."""


class ComposeFileError(ValueError):
    """A compose file says something that a sandbox cannot be; the message says what helps."""


def spec_of(
    file: Any,
    image: str | None,
    main: str = MAIN,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    has_files: Callable[[str], bool] = lambda _: False,
) -> dict[str, Any]:
    """Return the environment that a compose file describes, as a spec.

    A directory of the client's machine that a service mounts, such as one for logs, becomes an empty one of the state.

    Args:
        file: The parsed file.
        image: The image of the main container if the file names none, or by a variable without a value.
        main: Name of the service in which the agent works.
        variables: The values of variables that the file uses.
        has_files: Says of the source of a mount whether there is something that the service would find.

    Raises:
        ComposeFileError: The file says something that a sandbox cannot be.
    """
    services = file.get("services") if isinstance(file, dict) else None
    if not isinstance(services, dict) or not services:
        raise ComposeFileError("The compose file has no services.")
    services = _filled(services, variables)
    if image and isinstance(services.get(main), dict) and "$" in str(services[main].get("image")):
        services[main] = {**services[main], "image": image}
    agent, sides = services.get(main) or {}, {name: side or {} for name, side in services.items() if name != main}
    if not sides and isinstance(agent, dict) and agent.get("network_mode") == "none":
        # A sandbox of one service has no network either. A side service without one could not be reached.
        agent = {key: value for key, value in agent.items() if key != "network_mode"}
    _check(main, agent, _MAIN | {"build"})
    if not (agent.get("image") or image):
        raise ComposeFileError(f"Nothing names the image of service {main!r}. Build it, and name it with `image`.")
    if (command := agent.get("command")) and not _IDLE.search(
        command if isinstance(command, str) else " ".join(command)
    ):
        raise ComposeFileError(
            f"Service {main!r} has a command of its own, which would not run: calls run in this service. Start the "
            "command in a side service."
        )
    if MAIN in sides:
        raise ComposeFileError(f"A service beside {main!r} is named {MAIN!r}, as sandboxes name {main!r}. Rename it.")
    spec = {
        "image": agent.get("image") or image, "env": _environment(main, agent),
        "services": {name: _service(name, side, main) for name, side in sides.items()},
        "volumes": _volumes({**sides, MAIN: agent}),
    }  # fmt: skip
    if made := making(_folders({**sides, MAIN: agent}, has_files)):
        spec["setup"] = list(made)
    if limits := _limits(main, agent):
        spec["limits"] = limits
    return spec | ({"workdir": agent["working_dir"]} if agent.get("working_dir") else {})


def has_files(folder: Path, source: str) -> bool:
    """Return whether the source of a mount, in a compose file of a folder, is a file or a directory with some."""
    path = folder / source
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def default_of(file: Any) -> str:
    """Return the name of the service in which the agent works, by the rule of Inspect AI.

    That is the service with `x-default: true`, else the one that is named `default`, else the first.
    """
    services = file.get("services") if isinstance(file, dict) else None
    if not isinstance(services, dict) or not services:
        raise ComposeFileError("The compose file has no services.")
    marked = [str(name) for name, service in services.items() if isinstance(service, dict) and service.get("x-default")]
    return (marked + ["default"] * ("default" in services) + [str(name) for name in services])[0]


def _check(name: str, service: Any, known: frozenset[str]) -> None:
    if not isinstance(service, dict):
        raise ComposeFileError(f"Service {name!r} is not a mapping.")
    if unknown := sorted(key for key in service.keys() - known - _IGNORED if not key.startswith("x-")):
        raise ComposeFileError(
            f"Service {name!r} has {unknown[0]!r}, which services of a sandbox do not have. Write a "
            "spec (docs/services.md)."
        )
    used = {key: value for key, value in service.items() if key not in _IGNORED - _LIMITS}
    used["volumes"] = [_mount(entry)[1:] for entry in service.get("volumes") or ()]
    if found := _VARIABLE.search(str(used).replace("$$", "")):
        raise ComposeFileError(f"Service {name!r} uses the variable {found[0]}. Write its value into the compose file.")


def _service(name: str, service: Mapping[str, Any], main: str) -> dict[str, Any]:
    _check(name, service, _SIDE)
    if not service.get("image"):
        raise ComposeFileError(f"Service {name!r} names no image. Build it, and name it with `image`.")
    members = {key: _words(service[key]) for key in ("entrypoint", "command") if service.get(key) is not None}
    members |= {key: str(service[key]) for key in ("user", "working_dir") if service.get(key) is not None}
    health = service.get("healthcheck") or {}
    test = health.get("test")
    if test and not health.get("disable") and test != ["NONE"]:
        members["healthcheck"] = _words(test)
    elif (port := _only_port(service)) is not None:
        members["port"] = port
    return {
        "image": service["image"], "environment": _environment(name, service),
        "depends_on": [other for other in _depends_on(name, service) if other != main], **members,
    }  # fmt: skip


def _words(value: Any) -> Any:
    """Return a command line with `$$` as `$`: a string, or a list of words."""
    return str(value).replace("$$", "$") if isinstance(value, str) else [str(word).replace("$$", "$") for word in value]


def _environment(name: str, service: Mapping[str, Any]) -> dict[str, str]:
    given = service.get("environment") or {}
    pairs = given.items() if isinstance(given, dict) else (str(entry).partition("=")[::2] for entry in given)
    variables = {str(key): value for key, value in pairs}
    # A list names a variable of the client's own by its name alone.
    missing = [key for key, value in variables.items() if value is None]
    if not isinstance(given, dict):
        missing = [str(entry) for entry in given if "=" not in str(entry)]
    if missing:
        raise ComposeFileError(f"Service {name!r} has the variable {missing[0]!r} without a value. Write its value.")
    return {key: str(value).replace("$$", "$") for key, value in variables.items()}


def _depends_on(name: str, service: Mapping[str, Any]) -> Sequence[str]:
    given = service.get("depends_on") or ()
    if isinstance(given, dict):
        for other, how in given.items():
            if (how or {}).get("condition") == "service_completed_successfully":
                raise ComposeFileError(
                    f"Service {name!r} waits for the end of {other!r}, but services of a sandbox keep running. Do its "
                    "work in the image, or in `setup` of a spec."
                )
    return [str(other) for other in given]


def _only_port(service: Mapping[str, Any]) -> int | None:
    """Return the port inside the container that a service names, if it names exactly one."""
    entries = [*(service.get("expose") or ()), *(service.get("ports") or ())]
    inside = [entry.get("target") if isinstance(entry, dict) else str(entry).rpartition(":")[2] for entry in entries]
    ports = {str(port).partition("/")[0] for port in inside}
    return int(ports.pop()) if len(ports) == 1 and all(port.isdigit() for port in ports) else None


def _volumes(services: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the volumes that several services share; a directory of one service needs none."""
    users: dict[str, dict[str, str]] = {}
    for name, service in services.items():
        for entry in service.get("volumes") or ():
            source, target, options = _mount(entry)
            if not target or _is_path(source):
                continue
            if "ro" in options.split(","):
                raise ComposeFileError(
                    f"Service {name!r} mounts {source}. A sandbox has no read-only volumes: put the files into the "
                    "image."
                )
            users.setdefault(source, {})[name] = target.rstrip("/")
    return {volume: paths for volume, paths in users.items() if len(paths) > 1}


def _folders(services: Mapping[str, Mapping[str, Any]], has_files: Callable[[str], bool]) -> list[str]:
    """Return where services mount directories of the client's machine, as paths in the main container."""
    folders = set()
    for name, service in services.items():
        below = "" if name == MAIN else f"{SERVICES}/{name}"
        for entry in service.get("volumes") or ():
            source, target, options = _mount(entry)
            if not target or not _is_path(source):
                continue
            system = source.startswith("/") and is_system(absolute(source))
            if "ro" in options.split(",") or system or has_files(source):
                raise ComposeFileError(
                    f"Service {name!r} mounts {source} for its files, and a sandbox has no paths of the host: put the "
                    "files into the image."
                )
            folders.add(below + absolute(target))
    return sorted(folders)


def _is_path(source: str) -> bool:
    return "/" in source or source.startswith((".", "~", "$"))


def _limits(name: str, service: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of the main service, as a spec has them."""
    resources = ((service.get("deploy") or {}).get("resources") or {}).get("limits") or {}
    cpus, memory = service.get("cpus") or resources.get("cpus"), service.get("mem_limit") or resources.get("memory")
    limits: dict[str, Any] = {}
    try:
        if cpus and float(cpus) > 0:
            limits["cpus"] = float(cpus)
        if memory and (parts := re.fullmatch(r"([0-9.]+) *([bkmg]?)b?", str(memory).lower())):
            limits["memory_mb"] = max(16, int(float(parts[1]) * _UNITS[parts[2]]) >> 20)
    except ValueError:
        raise ComposeFileError(f"Service {name!r} has the limits cpus {cpus!r} and memory {memory!r}.") from None
    return limits


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a file with the values of its variables; those without a value stay."""
    if isinstance(value, dict):
        return {key: _filled(member, variables) for key, member in value.items()}
    if isinstance(value, list):
        return [_filled(member, variables) for member in value]
    return _VARIABLE.sub(lambda found: _value(found, variables), value) if isinstance(value, str) else value


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, how, other = found["braced"] or found["bare"], found["how"] or "", found["other"] or ""
    if not name:
        # Two dollars stand for one, which the members' own readers know.
        return found[0]
    given = variables.get(name)
    if how.startswith(":") and not given:
        given = None
    if how.endswith("+"):
        return other if given is not None else ""
    if given is None:
        return other if how.endswith("-") else found[0]
    return given.replace("$", "$$")


_VARIABLE = re.compile(r"\$(?:\$|\{(?P<braced>\w+)(?:(?P<how>:?[-?+])(?P<other>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
"""Matches a variable as compose files write it, and two dollars."""


def _mount(entry: Any) -> tuple[str, str, str]:
    """Return source, target and options of a mount; no target for an anonymous volume, which is a plain directory."""
    if isinstance(entry, dict):
        options = "ro" if entry.get("read_only") else ""
        if entry.get("type") == "tmpfs" or not entry.get("source"):
            return "", "", ""
        return str(entry["source"]), str(entry.get("target") or ""), options
    source, _, rest = str(entry).partition(":")
    target, _, options = rest.partition(":")
    return source, target, options
