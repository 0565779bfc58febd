"""The services of a compose file as members of a spec (pure).

What a sandbox cannot be is refused, because a task without one of its parts would be another task.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MAIN = "main"
"""The service in which the agent works, as harnesses name it."""
_IGNORED = frozenset({
    "container_name", "deploy", "expose", "hostname", "init", "labels", "logging", "networks", "platform", "ports",
    "pull_policy", "restart", "stdin_open", "stop_grace_period", "stop_signal", "tty",
})  # fmt: skip
"""Members that do not change what programs meet: all services share one network, whose ports are all open inside."""
_MAIN = frozenset({"command", "depends_on", "environment", "image", "volumes", "working_dir"})
"""Members of the main service that have a meaning. Its command only keeps it running."""
_SIDE = _MAIN | {"entrypoint", "healthcheck", "user"}
"""Members of a side service that have a meaning."""


class ComposeFileError(ValueError):
    """A compose file says something that a sandbox cannot be; the message says what helps."""


def spec_of(file: Any, image: str | None) -> dict[str, Any]:
    """Return the environment that a compose file describes, as a spec of the driver `container`.

    Args:
        file: The parsed file.
        image: The image of the main container if the file names none.

    Raises:
        ComposeFileError: The file says something that a sandbox cannot be.
    """
    services = file.get("services") if isinstance(file, dict) else None
    if not isinstance(services, dict) or not services:
        raise ComposeFileError("The compose file has no services.")
    main = services.get(MAIN) or {}
    _check(MAIN, main, _MAIN | {"build"})
    main_image = main.get("image") or image
    if not main_image:
        raise ComposeFileError("Nothing names the image of the main container. Build it, and name it as docker_image.")
    sides = {name: side or {} for name, side in services.items() if name != MAIN}
    spec = {
        "driver": "container", "image": main_image, "env": _environment(MAIN, main),
        "services": {name: _service(name, side) for name, side in sides.items()},
        "volumes": _volumes({**sides, MAIN: main}),
    }  # fmt: skip
    return spec | ({"workdir": main["working_dir"]} if main.get("working_dir") else {})


def _check(name: str, service: Any, known: frozenset[str]) -> None:
    if not isinstance(service, dict):
        raise ComposeFileError(f"Service {name!r} is not a mapping.")
    if unknown := sorted(service.keys() - known - _IGNORED):
        raise ComposeFileError(
            f"Service {name!r} has {unknown[0]!r}, which services of a sandbox do not have. Write a "
            "spec (docs/services.md)."
        )
    if "$" in str(service).replace("$$", ""):
        raise ComposeFileError(f"Service {name!r} uses a variable ($…). Write its value into the compose file.")


def _service(name: str, service: Mapping[str, Any]) -> dict[str, Any]:
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
        "depends_on": [other for other in _depends_on(name, service) if other != MAIN], **members,
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
