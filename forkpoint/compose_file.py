"""The services of a compose file as members of a spec (pure).

What a sandbox cannot be is refused, because a task without one of its parts would be another task.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAIN = "main"
"""The main container's name in a spec, and in the compose files of most harnesses."""
_IGNORED = frozenset({
    "container_name", "cpus", "deploy", "expose", "hostname", "init", "labels", "logging", "mem_limit",
    "mem_reservation", "memswap_limit", "networks", "platform", "ports", "pull_policy", "restart", "stdin_open",
    "stop_grace_period", "stop_signal", "tty",
})  # fmt: skip
"""Members that do not change what programs meet: all services share one network, whose ports are all open inside. The
limits of a spec hold instead of those of a file."""
_MAIN = frozenset({"command", "depends_on", "environment", "image", "volumes", "working_dir"})
"""Members of the main service that have a meaning. Its command only keeps it running."""
_SIDE = _MAIN | {"entrypoint", "healthcheck", "user"}
"""Members of a side service that have a meaning."""
_IDLE = re.compile(r"\b(sleep|tail|cat|wait|infinity)\b|\A(/bin/)?(ba)?sh\Z")
"""Matches commands that only keep a container running."""


class ComposeFileError(ValueError):
    """A compose file says something that a sandbox cannot be; the message says what helps."""


def spec_of(file: Any, image: str | None, main: str = MAIN) -> dict[str, Any]:
    """Return the environment that a compose file describes, as a spec.

    Args:
        file: The parsed file.
        image: The image of the main container if the file names none.
        main: Name of the service in which the agent works.

    Raises:
        ComposeFileError: The file says something that a sandbox cannot be.
    """
    services = file.get("services") if isinstance(file, dict) else None
    if not isinstance(services, dict) or not services:
        raise ComposeFileError("The compose file has no services.")
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
    return spec | ({"workdir": agent["working_dir"]} if agent.get("working_dir") else {})


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
    if "$" in str(service).replace("$$", ""):
        raise ComposeFileError(f"Service {name!r} uses a variable ($…). Write its value into the compose file.")


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
            if not target:
                continue
            if "/" in source or source.startswith((".", "~")) or "ro" in options.split(","):
                raise ComposeFileError(
                    f"Service {name!r} mounts {source}. A sandbox has no paths of the host, and no read-only volumes: "
                    "put the files into the image."
                )
            users.setdefault(source, {})[name] = target.rstrip("/")
    return {volume: paths for volume, paths in users.items() if len(paths) > 1}


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
