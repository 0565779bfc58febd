"""Containers of a compose project as side services of one sandbox: what a create request means (pure).

A project is one rollout and one sandbox. The container that only waits (`sleep infinity`) is its main container, in
which the agent works; every other one is a side service. If none waits, the main container has the image of the first
one, and only carries the services. Names that Docker's clients make up are in no spec: rollouts of any name share a
tree.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.compat.docker.mounts import Mounts, mounts_of
from proxy.compat.docker.requests import ContainerSpec, arguments_of, variables
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from sandboxes.images.waiting_commands import waits as waits_alone
from sandboxes.local.service_commands import HOST_NAME, SERVICES, only_port, ready_s
from sandboxes.server_spec import MAIN

PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"
"""Labels that compose gives its containers; networks and volumes have the first one, too."""
VOLUME = "com.docker.compose.volume"
OUTPUT = "/.output"
"""The file of a side service that has what it printed. It is part of the state, so `docker logs` is a call."""
_ONE_OFF, _DEPENDS_ON = "com.docker.compose.oneoff", "com.docker.compose.depends_on"
_RUN = f'"$@" >>{OUTPUT} 2>&1 || {{ c=$?; cat {OUTPUT}; exit $c; }}'
"""Runs a service's command and keeps its output. If the command fails, the start of the sandbox reports the output."""
_HERE = frozenset({"127.0.0.1", "::1"})
_SHORT_ID = re.compile(r"[0-9a-f]{12}")
_NS = 10**9


@dataclass(frozen=True, slots=True)
class ProjectMember:
    """A container of a project, as its create request describes it."""

    name: str  # On the project's network.
    image: str
    waits: bool  # Its command only waits, so it can be the main container.
    service: Mapping[str, Any]  # The members of a side service, as a spec has them.
    depends_on: frozenset[str]  # Names of the members that must be ready before.
    volumes: Mapping[str, str]  # The path of each named volume that it uses.
    aliases: frozenset[str]  # Further names on the network.
    mounts: Mounts = field(default_factory=Mounts)  # Directories that are made for it.


def member(
    name: str, spec: ContainerSpec, config: Mapping[str, Any], volumes: Mapping[str, str], running: Collection[str]
) -> ProjectMember:
    """Return what the parsed create request of a container means, with the defaults of its image (`config`).

    `volumes` maps clients' names of volumes to the spec's. `running` names the members that run already: Compose 1 does
    not say what depends on what, but starts that first. Raises RefusalError (400).
    """
    body, labels = spec.body, spec.body.get("Labels") or {}
    host = body.get("HostConfig") or {}
    own_name = str(labels.get(SERVICE) or name)
    _refuse(own_name, host, labels)
    waits, argv = not spec.main, arguments_of(body, config)
    health = _health(body, config)
    port = only_port(body.get("ExposedPorts") or {})
    if not waits and not health and port is None and only_port(config.get("ExposedPorts") or {}) is None:
        raise RefusalError(
            400, "docker", f"Nothing says when service {own_name!r} is ready. Give it a healthcheck, or exactly one "
            "port under `expose` in the compose file, so that no call meets it half started.",
        )  # fmt: skip
    service = {
        "image": spec.image, "entrypoint": ("/bin/sh", "-c", _RUN, "sh"),
        "command": argv if argv and (not waits or waits_alone(argv, interactive=False)) else ("sleep", "infinity"),
        "environment": variables(body.get("Env")), "working_dir": body.get("WorkingDir") or None,
        "user": spec.user or None, "healthcheck": ("CMD-SHELL", ":") if waits else health or None,
        "port": None if waits or health else port, "ready_s": _ready_s(body.get("Healthcheck") or {}),
    }  # fmt: skip
    depends_on = _depends_on(own_name, labels, running)
    return ProjectMember(
        own_name,
        spec.image,
        waits,
        service,
        depends_on,
        _mounts(host, volumes),
        _aliases(body, own_name, name),
        mounts_of(host),
    )


def _refuse(name: str, host: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    if str(labels.get(_ONE_OFF, "")).lower() == "true":
        raise RefusalError(
            400, "docker", "Forkpoint has no `docker compose run`: a project is one state. Use `docker compose exec`."
        )
    if host.get("Privileged"):
        raise RefusalError(
            400, "docker", f"Service {name!r}, HostConfig.Privileged: services run without privileges. Remove "
            "`privileged` from the compose file.",
        )  # fmt: skip


def _health(body: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    for source in (body, config):
        test = (source.get("Healthcheck") or {}).get("Test") or ()
        if test:
            return () if test[0] == "NONE" else tuple(map(str, test))
    return ()


def _ready_s(check: Mapping[str, Any]) -> float:
    interval_s, timeout_s, start_s = ((check.get(key) or 0) / _NS for key in ("Interval", "Timeout", "StartPeriod"))
    return ready_s(interval_s, timeout_s, start_s, check.get("Retries"))


def _depends_on(name: str, labels: Mapping[str, str], running: Collection[str]) -> frozenset[str]:
    text = labels.get(_DEPENDS_ON)
    if text is None:
        return frozenset(running)
    # Compose 2 writes `name:condition:restart`, separated by commas.
    entries = [entry.split(":") for entry in text.split(",") if entry]
    for other, *condition in entries:
        if condition[:1] == ["service_completed_successfully"]:
            raise RefusalError(
                400, "docker", f"Service {name!r} waits for the end of {other!r}. All services of a project keep "
                f"running: run the command of {other!r} with `docker compose exec` after the start.",
            )  # fmt: skip
    return frozenset(entry[0] for entry in entries)


def _mounts(host: Mapping[str, Any], volumes: Mapping[str, str]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for source, target in mounts_of(host).volumes:
        if source not in volumes:
            raise RefusalError(400, "docker", f"There is no volume {source!r}. Create it before its containers.")
        if volumes[source] in paths:
            raise RefusalError(400, "docker", f"Volume {source!r} has two paths in one container. Leave one out.")
        paths[volumes[source]] = target.rstrip("/")
    return paths


def _aliases(body: Mapping[str, Any], own_name: str, container_name: str) -> frozenset[str]:
    networks = (body.get("NetworkingConfig") or {}).get("EndpointsConfig") or {}
    named = {str(alias) for endpoint in networks.values() for alias in (endpoint or {}).get("Aliases") or ()}
    hosts = (str(entry).partition(":") for entry in (body.get("HostConfig") or {}).get("ExtraHosts") or ())
    named |= {name for name, _, address in hosts if address.strip("[]") in _HERE and HOST_NAME.fullmatch(name)}
    # Compose adds the container's name, or the beginning of an ID, which differ in each project and rollout.
    return frozenset(alias for alias in named - {own_name, container_name} if not _SHORT_ID.fullmatch(alias))


def main_member(members: Sequence[ProjectMember]) -> ProjectMember | None:
    """Return the member that becomes the main container; None if each of them does something."""
    waiting = sorted((member for member in members if member.waits), key=lambda member: member.name)
    return next((member for member in waiting if member.name == MAIN), waiting[0] if waiting else None)


def environment(members: Sequence[ProjectMember], requests: Mapping[str, EnvironmentRequest]) -> EnvironmentRequest:
    """Return a project's environment from what each member would be alone. Raises RefusalError (400) for a bad name."""
    main = main_member(members)
    services = sorted((member for member in members if member is not main), key=lambda member: member.name)
    names = {member.name for member in services}
    users: dict[str, dict[str, str]] = {}
    for member in [*services, *([main] if main is not None else [])]:
        for volume, path in member.volumes.items():
            users.setdefault(volume, {})[MAIN if member is main else member.name] = path
    further = {alias for member in members for alias in member.aliases} | ({main.name} if main is not None else set())
    outputs = [f": >{SERVICES}/{name}{OUTPUT} && chmod 666 {SERVICES}/{name}{OUTPUT}" for name in sorted(names)]
    folders = [
        command
        for member in sorted(members, key=lambda member: member.name)
        for below in ("" if member is main else f"{SERVICES}/{member.name}",)
        for command in member.mounts.setup(below)
    ]
    unused = sorted(further - names - {MAIN}) if services else []
    if wrong := [name for name in unused if not HOST_NAME.fullmatch(name)]:
        raise RefusalError(
            400, "docker", f"{wrong[0]!r} cannot be a name on the project's network. Use at most 31 lower-case "
            "letters, digits, '-' and '_', the first of them a letter.",
        )  # fmt: skip
    base = requests[main.name] if main is not None else EnvironmentRequest(services[0].image)
    return EnvironmentRequest(
        base.image, base.env, base.workdir, base.memory_mb, base.pids, base.cpus,
        services={
            member.name: {**member.service, "depends_on": tuple(sorted(member.depends_on & names))}
            for member in services
        },
        # A volume with one user is a directory of it.
        volumes={volume: paths for volume, paths in sorted(users.items()) if len(paths) > 1},
        aliases=tuple(unused),
        setup=(*outputs, *folders),
    )  # fmt: skip
