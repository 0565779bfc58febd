"""The services of a compose file as members of a spec.

What a sandbox cannot be is refused, because a task without one of its parts would be another task. What the isolation
of a sandbox makes meaningless is left out; a note says so where a program could notice.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forkpoint.compose_errors import ComposeFileError, Reason
from forkpoint.compose_mounts import Mounted, listed, mounted, mounts_of
from forkpoint.compose_values import emptied, filled, plain, seconds, size_bytes, unset_variable, variables_of
from sandboxes.images.waiting_commands import waits
from sandboxes.local.service_commands import HOST_NAME, ROOT, SERVICES, making, ready_s

MAIN = "main"
"""The main container's name in a spec, and in the compose files of most harnesses."""
_MEANT = frozenset({
    "build", "command", "depends_on", "devices", "entrypoint", "env_file", "environment", "expose", "extra_hosts",
    "gpus", "healthcheck", "image", "ipc", "links", "network_mode", "pid", "privileged", "profiles", "read_only",
    "runtime", "tmpfs", "user", "volumes", "working_dir",
})  # fmt: skip
"""Members that are read of each service. Variables in them need a value."""
_NAMES = frozenset({"container_name", "hostname", "networks"})
"""Members that give a service further names on the network."""
_LIMITS = frozenset({"cpus", "deploy", "mem_limit", "pids_limit"})
"""Members that are read of the main service: its limits hold for all services together."""
_IGNORED = frozenset({
    "annotations", "attach", "blkio_config", "cap_drop", "cgroup", "cgroup_parent", "cpu_count", "cpu_percent",
    "cpu_period", "cpu_quota", "cpu_rt_period", "cpu_rt_runtime", "cpu_shares", "cpuset", "develop", "dns", "dns_opt",
    "dns_search", "domainname", "init", "isolation", "labels", "label_file", "logging", "mac_address",
    "mem_reservation", "mem_swappiness", "memswap_limit", "oom_kill_disable", "oom_score_adj", "platform", "ports",
    "pull_policy", "restart", "scale", "shm_size", "stdin_open", "stop_grace_period", "stop_signal", "storage_opt",
    "tty", "userns_mode", "uts",
})  # fmt: skip
"""Members that do not change what programs meet: all services share one network, whose ports are all open inside."""
_NOTED = {
    "cap_add": "the processes of a sandbox have the capabilities that all sandboxes have.",
    "security_opt": "the security profile is that of all sandboxes.",
    "ulimits": "the limits of processes are those of all sandboxes.",
    "sysctls": "kernel parameters are those of all sandboxes.",
    "group_add": "processes have the groups of their user only.",
}
"""Members that have no effect, and what a program may notice."""
_REQUIRED = re.compile(r"\$\{\w+:?\?")
_HERE = frozenset({"127.0.0.1", "::1", "localhost"})

Service = Mapping[str, Any]


def spec_of(
    file: Any,
    image: str | None,
    main: str = MAIN,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    folder: Path | None = None,
    build: Callable[[Any], str] | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return the environment that a parsed compose file describes, as a spec. Raises ComposeFileError.

    Text files of the task's directory that a service mounts are copied into the spec. Other directories of the client's
    machine become empty ones of the state.

    Args:
        file: The parsed file.
        image: The image of the main container if the file names none, or by a variable without a value.
        main: Name of the service in which the agent works.
        variables: The values of variables that the file uses. They precede those of the file `.env` beside it.
        folder: The directory of the file; None if no file can be read.
        build: Builds what a member `build` describes, and returns the image's name. None builds nothing.
        note: Gets a sentence for each member that is not taken word for word.
    """
    services = _services(file)
    if "include" in file:
        raise ComposeFileError(Reason.MALFORMED, "The compose file has 'include'. Write all services into one file.")
    values = {**variables_of(_text(folder, ".env")), **variables}
    services = {name: _checked(name, filled(service or {}, values)) for name, service in services.items()}
    agent = services.get(main, {})
    if image and (unset_variable(agent.get("image")) or not agent.get("image")):
        agent = {key: value for key, value in agent.items() if key != "build"} | {"image": image}
    sides = {
        name: service
        for name, service in services.items()
        # As in Docker, a service with a profile starts only where somebody asks for it.
        if name != main and not service.get("profiles")
    }
    if MAIN in sides:
        raise ComposeFileError(
            Reason.VALUE, f"A service beside {main!r} is named {MAIN!r}, as sandboxes name {main!r}. Rename it."
        )
    _check_main(main, agent)
    for name, service in {main: agent, **sides}.items():
        _check(name, service, {main, *sides}, note)
    return _spec(main, agent, sides, folder, build, note)


def _spec(
    main: str,
    agent: Service,
    sides: Mapping[str, Service],
    folder: Path | None,
    build: Callable[[Any], str] | None,
    note: Callable[[str], object],
) -> dict[str, Any]:
    places = {MAIN: "", **{name: f"{SERVICES}/{name}" for name in sides}}
    mounts = mounted({**sides, MAIN: agent}, places, folder, note)
    spec: dict[str, Any] = {
        "image": _image(main, agent, build), "env": _environment(main, agent, folder, note),
        "services": {name: _side(name, side, main, sides, folder, build, note) for name, side in sides.items()},
        "volumes": mounts.volumes,
    }  # fmt: skip
    further = {
        "files": mounts.files, "setup": list(_setup(mounts)), "limits": _limits(main, agent),
        "aliases": sorted(_aliases(main, agent, sides, note)), "workdir": agent.get("working_dir"),
    }  # fmt: skip
    return spec | {member: value for member, value in further.items() if value}


def default_of(file: Any) -> str:
    """Return the service in which the agent works, as in Inspect AI: by `x-default`, named `default`, or the first."""
    services = _services(file)
    marked = [str(name) for name, service in services.items() if isinstance(service, dict) and service.get("x-default")]
    return (marked + ["default"] * ("default" in services) + [str(name) for name in services])[0]


def _services(file: Any) -> dict[str, Any]:
    services = file.get("services") if isinstance(file, dict) else None
    if not isinstance(services, dict) or not services:
        raise ComposeFileError(Reason.MALFORMED, "The compose file has no services.")
    return services


def _checked(name: str, service: Any) -> dict[str, Any]:
    """Return a service that is well-formed as far as it is read. An empty member is one that is missing."""
    if not isinstance(service, dict):
        raise ComposeFileError(Reason.MALFORMED, f"Service {name!r} is not a mapping.")
    kinds: dict[str, tuple[type, ...]] = {
        "volumes": (list,), "environment": (dict, list), "depends_on": (dict, list), "deploy": (dict,),
        "healthcheck": (dict,), "networks": (dict, list), "extra_hosts": (dict, list),
    }  # fmt: skip
    for key, kind in kinds.items():
        if service.get(key) and not isinstance(service[key], kind):
            raise ComposeFileError(Reason.MALFORMED, f"Service {name!r} has {key!r} of a wrong type.")
    # `command: []` clears a command, and `user: 0` is a user.
    return {key: value for key, value in service.items() if value is not None and value is not False and value != {}}


def _check_main(main: str, agent: Service) -> None:
    command = [*_words(agent.get("entrypoint") or ()), *_words(agent.get("command") or ())]
    if not waits(tuple(command), interactive=True):
        raise ComposeFileError(
            Reason.COMMAND, f"Service {main!r} has a command of its own (command), which would not run: calls run in "
            "this service. Start the command in a side service.",
        )  # fmt: skip
    if (user := str(agent.get("user", ""))) not in ROOT:
        raise ComposeFileError(
            Reason.VALUE, f"Service {main!r} has the user {user!r} (user). Name it in the image, with USER."
        )


def _check(name: str, service: Service, names: set[str], note: Callable[[str], object]) -> None:
    """Refuse what a service of a sandbox cannot be, and note what it does without."""
    for key, reason, why in _refusals(service, names):
        raise ComposeFileError(reason, f"Service {name!r} has {key!r}: {why}")
    known = _MEANT | _NAMES | _LIMITS | _IGNORED | _NOTED.keys()
    if unknown := sorted(key for key in service.keys() - known if not key.startswith("x-")):
        raise ComposeFileError(
            Reason.UNKNOWN, f"Service {name!r} has {unknown[0]!r}, which services of a sandbox do not have. Write a "
            "spec (docs/containers.md).",
        )  # fmt: skip
    used = {key: service[key] for key in service.keys() & _MEANT - {"environment", "volumes", "tmpfs"}}
    used["volumes"] = [mount[1:] for mount in mounts_of(name, service)]
    for key, value in used.items():
        if found := unset_variable(value):
            raise ComposeFileError(
                Reason.VALUE, f"Service {name!r} uses the variable {found} ({key}). Write its value into the compose "
                "file.",
            )  # fmt: skip
    for key in sorted(_NOTED.keys() & service.keys()):
        note(f"Service {name!r}: {key} has no effect; {_NOTED[key]}")
    if service.get("network_mode") == "host":
        note(f"Service {name!r}: network_mode has no effect; all services share one network without a way out.")


def _refusals(service: Service, names: set[str]) -> Iterator[tuple[str, Reason, str]]:
    """Yield each member that a sandbox cannot have, and why."""
    for key, allowed, reason, why in _REFUSED:
        if service.get(key) and service[key] not in allowed:
            yield key, reason, why
    if "nvidia" in str(service.get("runtime")):
        yield "runtime", Reason.DEVICES, _NO_DEVICES
    resources = (service.get("deploy") or {}).get("resources") or {}
    if (resources.get("reservations") or {}).get("devices"):
        yield "deploy.resources.reservations.devices", Reason.DEVICES, _NO_DEVICES
    mode, _, shared = str(service.get("network_mode") or "").partition(":")
    if mode == "none" and len(names) > 1:
        # A sandbox of one service has no network either. A side service without one could not be reached.
        yield "network_mode", Reason.NETWORK, "all services of a sandbox share one network."
    if mode == "container" or (mode == "service" and shared not in names):
        yield "network_mode", Reason.NETWORK, "the containers of other projects cannot be reached."
    for other, how in _conditions(service).items():
        if how == "service_completed_successfully":
            yield f"depends_on.{other}", Reason.COMMAND, _KEEP_RUNNING


_NO_DEVICES = "a sandbox has no devices."
_KEEP_RUNNING = (
    "it waits for the end of a service, but services of a sandbox keep running. Do its work in the image, or in "
    "`setup` of a spec."
)
_REFUSED: tuple[tuple[str, tuple[str, ...], Reason, str], ...] = (
    ("privileged", (), Reason.RIGHTS, "programs of a sandbox have no rights over its machine."),
    ("pid", ("private",), Reason.RIGHTS, "a sandbox shows no processes of others."),
    ("ipc", ("private", "shareable", "none"), Reason.RIGHTS, "a sandbox shares no memory with others."),
    ("read_only", (), Reason.RIGHTS, "the files of a sandbox are writable."),
    ("devices", (), Reason.DEVICES, _NO_DEVICES),
    ("gpus", (), Reason.DEVICES, _NO_DEVICES),
    ("extends", (), Reason.MALFORMED, "write the whole service into the file."),
)
"""Members that a sandbox cannot have, the values that are none, and why."""


def _conditions(service: Service) -> dict[str, str]:
    given = service.get("depends_on") or ()
    pairs = given.items() if isinstance(given, dict) else ((other, None) for other in given)
    return {str(other): str((how or {}).get("condition") or "") for other, how in pairs}


def _image(name: str, service: Service, build: Callable[[Any], str] | None) -> str:
    """Return the image of a service: the one that it names, unless it describes one that can be built."""
    if service.get("build") and build is not None:
        return build(service["build"])
    if service.get("image"):
        return str(service["image"])
    raise ComposeFileError(
        Reason.NO_IMAGE, f"Nothing names the image of service {name!r} (image). Build it, and name it with `image`."
    )


def _side(
    name: str,
    service: Service,
    main: str,
    sides: Mapping[str, Service],
    folder: Path | None,
    build: Callable[[Any], str] | None,
    note: Callable[[str], object],
) -> dict[str, Any]:
    members: dict[str, Any] = {key: _line(service[key]) for key in ("entrypoint", "command") if key in service}
    members |= {key: plain(service[key]) for key in ("user", "working_dir") if key in service}
    health, port = service.get("healthcheck") or {}, _only_port(service)
    test = health.get("test")
    words = (*_words(members.get("entrypoint") or ()), *_words(members.get("command") or ()))
    if test and not health.get("disable") and test != ["NONE"]:
        members["healthcheck"] = _line(test)
        interval_s, timeout_s, start_s = (seconds(health.get(key)) for key in ("interval", "timeout", "start_period"))
        members["ready_s"] = ready_s(interval_s, timeout_s, start_s, int(health.get("retries") or 3))
    elif port is not None:
        members["port"] = port
    elif words and waits(words, interactive=False):
        # It is ready at once: calls work in it with `exec`.
        members["healthcheck"] = ["CMD-SHELL", ":"]
    linked = [entry.partition(":")[0] for entry in listed(service.get("links"))]
    depends_on = dict.fromkeys(other for other in (*_conditions(service), *linked) if other != main and other in sides)
    return {
        "image": _image(name, service, build), "environment": _environment(name, service, folder, note),
        "depends_on": list(depends_on), **members,
    }  # fmt: skip


def _line(value: Any) -> Any:
    return plain(value) if isinstance(value, str) else [plain(word) for word in value]


def _words(value: Any) -> list[str]:
    try:
        return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
    except ValueError as error:
        raise ComposeFileError(Reason.MALFORMED, f"The command {value!r} cannot be split into words: {error}") from None


def _environment(name: str, service: Service, folder: Path | None, note: Callable[[str], object]) -> dict[str, str]:
    variables: dict[str, str] = {}
    entries = service.get("env_file") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        path, required = (entry["path"], entry.get("required", True)) if isinstance(entry, dict) else (entry, True)
        if folder is None or not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ComposeFileError(
                Reason.HOST_FILES, f"Service {name!r} reads {path} (env_file), which is not in the task's directory. "
                "Write the variables into the compose file.",
            )  # fmt: skip
        if required and not (folder / path).is_file():
            raise ComposeFileError(Reason.VALUE, f"Service {name!r} reads {path} (env_file), which is missing.")
        variables |= variables_of(_text(folder, str(path)))
    given = service.get("environment") or {}
    pairs = given.items() if isinstance(given, dict) else (_pair(str(entry)) for entry in given)
    for key, value in pairs:
        # As in Docker where the client has no such variable. This machine's own are not for tasks.
        if value is None:
            note(f"Service {name!r}: the variable {key} has no value (environment), and is not set.")
        elif found := unset_variable(value):
            note(f"Service {name!r}: the variable {key} uses {found}, which has no value (environment), and is empty.")
            if _REQUIRED.match(found):
                raise ComposeFileError(
                    Reason.VALUE, f"Service {name!r} requires the variable {found} (environment). Write its value into "
                    "the compose file.",
                )  # fmt: skip
            variables[str(key)] = plain(emptied(value))
        else:
            variables[str(key)] = plain(value)
    return variables


def _pair(entry: str) -> tuple[str, str | None]:
    key, given, value = entry.partition("=")
    return key, value if given else None


def _text(folder: Path | None, name: str) -> str:
    """Return the text of a file of the task's directory; empty if it is missing, or if a link leads elsewhere."""
    if folder is None:
        return ""
    path = folder / name
    is_own = path.is_file() and path.resolve().is_relative_to(folder.resolve())
    return path.read_text(errors="replace") if is_own else ""


def _only_port(service: Service) -> int | None:
    """Return the port inside the container that a service names, if it names exactly one."""
    entries = [*(service.get("expose") or ()), *(service.get("ports") or ())]
    inside = [entry.get("target") if isinstance(entry, dict) else str(entry).rpartition(":")[2] for entry in entries]
    ports = {str(port).partition("/")[0] for port in inside if "/udp" not in str(port)}
    return int(ports.pop()) if len(ports) == 1 and all(port.isdigit() for port in ports) else None


def _setup(mounts: Mounted) -> Iterator[str]:
    yield from making(mounts.folders, mounts.memory)
    if mounts.programs:
        yield f"chmod +x -- {shlex.join(sorted(mounts.programs))}"


def _aliases(main: str, agent: Service, sides: Mapping[str, Service], note: Callable[[str], object]) -> set[str]:
    """Return the further names of services: all of them are this sandbox."""
    names = {main}
    for name, service in {main: agent, **sides}.items():
        own = {str(service[key]) for key in ("container_name", "hostname") if service.get(key)}
        networks = service.get("networks")
        for network in networks.values() if isinstance(networks, dict) else ():
            own |= set(listed((network or {}).get("aliases")))
        own |= {entry.partition(":")[2] for entry in listed(service.get("links")) if ":" in entry}
        names |= own
        for host, address in _extra_hosts(service):
            if address in _HERE:
                names.add(host)
            else:
                note(f"Service {name!r}: {host} (extra_hosts) is not known, because there is no way to {address}.")
        for wrong in sorted(entry for entry in own if sides and not HOST_NAME.fullmatch(entry) and "$" not in entry):
            note(f"Service {name!r}: {wrong} is no name on the network of a sandbox, which knows {name}.")
    if not sides:
        # Nobody else is there to call the main container by another name.
        names &= {host for host, _ in _extra_hosts(agent)}
    return {entry for entry in names - sides.keys() - {MAIN} if HOST_NAME.fullmatch(entry)}


def _extra_hosts(service: Service) -> Iterator[tuple[str, str]]:
    given = service.get("extra_hosts") or ()
    if isinstance(given, dict):
        yield from ((str(host), str(address)) for host, address in given.items())
    else:
        for host, separator, address in (re.split(r"([=:])", str(entry), maxsplit=1) for entry in given):
            del separator
            yield host, address.strip("[]")


def _limits(name: str, service: Service) -> dict[str, Any]:
    resources = ((service.get("deploy") or {}).get("resources") or {}).get("limits") or {}
    cpus, memory = service.get("cpus") or resources.get("cpus"), service.get("mem_limit") or resources.get("memory")
    pids = service.get("pids_limit") or resources.get("pids")
    limits: dict[str, Any] = {}
    try:
        if cpus and float(cpus) > 0:
            limits["cpus"] = float(cpus)
        if memory:
            limits["memory_mb"] = max(16, size_bytes(memory) >> 20)
        if pids and int(pids) > 0:
            limits["pids"] = max(8, int(pids))
    except ValueError:
        raise ComposeFileError(
            Reason.VALUE, f"Service {name!r} has the limits cpus {cpus!r}, memory {memory!r} and pids {pids!r}."
        ) from None
    return limits
