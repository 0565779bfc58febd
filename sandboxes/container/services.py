"""The side services of a container: programs of other images that run beside the calls, in the same container.

Theory of operation. The files of each service's image become a directory of the root image, below `SERVICES`. A service
is a process with that directory as its root (chroot(2)), started by the anchor like a tool server. So all services are
part of one container: its limits, its network of only a loopback, its effects, its copies of files and its checkpoints
hold for the whole. The keeper gives each of these directories a /proc, a /dev, a /sys and names in /etc/hosts
(`keeper.mounts`).
"""

import asyncio
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from sandboxes.container.boot_scripts import SERVICES, SHARED
from sandboxes.container.daemon import SANDBOX, Daemon
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.container.service_commands import frame_of, only_port
from sandboxes.errors import SpecError
from sandboxes.host.provision import run_set_up
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.server_spec import MAIN, Service, start_order, words
from sandboxes.spec import EnvironmentSpec

_PREPARE = (
    f"mkdir -m 0700 {SERVICES} && for p in chroot env sleep touch; do "
    'command -v $p >/dev/null || { echo "the image has no $p" >&2; exit 1; }; done'
)
"""Makes the directory of the services, and checks that the main image has the programs that start them."""

_CLEAN = """\
rm -rf .dockerenv dev/* etc/hosts etc/hostname etc/resolv.conf
touch -h -d @1000000000 $(for f in etc/mtab dev proc sys etc .; do [ -e $f ] || [ -L $f ] && echo $f; done)"""
"""Removes what Docker adds to an image's files, and sets the times that this changed, so that equal images give equal
root states. The keeper writes the files in `etc` anew (`keeper.mounts`)."""


async def bring_services(
    sandbox: ContainerSandbox, spec: EnvironmentSpec, daemon: Daemon, labels: Mapping[str, str]
) -> None:
    """Copy the services' images into a container whose root state is being built, and prepare shared volumes.

    Args:
        sandbox: The container of the main image.
        spec: What it is made for.
        daemon: The Docker daemon that has the images.
        labels: Labels of this instance's containers.

    Raises:
        SpecError: An image is missing, or a path of a volume cannot be used.
        SandboxError: Docker failed.
    """
    if not spec.services:
        return
    # Mode 0700: a process of the main image that is not root finds no files of the services.
    await run_set_up(sandbox, spec, "services", _PREPARE)
    for name, service in sorted(spec.services.items()):
        await run_set_up(sandbox, spec, name, f"mkdir {SERVICES}/{name}")
        # The sweep removes a container that carries the name of a sandbox that is gone.
        marks = {**labels, SANDBOX: sandbox.id}
        await asyncio.to_thread(daemon.copy_image, service.image, sandbox.container, f"{SERVICES}/{name}", labels=marks)
        await run_set_up(sandbox, spec, name, f"cd {SERVICES}/{name}\n{_CLEAN}")
    lines = list(_shared(spec))
    for source, target in lines:
        for path in map(shlex.quote, (source, target)):
            # A link on the way would lead to another directory in here than in the service.
            check = f'mkdir -p -- {path} && cd -P -- {path} && [ "$(pwd -P)" = {path} ]'
            await run_set_up(sandbox, spec, f"volume {path}", check)
    text = "".join(f"{source}\t{target}\n" for source, target in lines)
    await run_set_up(sandbox, spec, "volumes", f"printf %s {shlex.quote(text)} > {SHARED}")


def _shared(spec: EnvironmentSpec) -> Iterator[tuple[str, str]]:
    """Yield the directory and the mount point of each further user of a volume, as paths of the container."""
    for users in spec.volumes.values():
        (source, *targets) = [path if user == MAIN else f"{SERVICES}/{user}{path}" for user, path in users.items()]
        for target in targets:
            yield source, target


def service_orders(spec: EnvironmentSpec, configs: Mapping[str, Mapping[str, Any]]) -> list[ServerOrder]:
    """Return what starts the services of a spec, in the order in which they start (pure).

    Args:
        spec: The spec.
        configs: The configuration of each service's image by the service's name, as Docker reports it.

    Raises:
        SpecError: A service names no command, or nothing says when it is ready.
    """
    return [_order(name, spec.services[name], configs[name]) for name in start_order(spec.services)]


def _order(name: str, service: Service, config: Mapping[str, Any]) -> ServerOrder:
    entry = words(service.entrypoint) if service.entrypoint is not None else list(config.get("Entrypoint") or ())
    default = [] if service.entrypoint is not None else list(config.get("Cmd") or ())
    command = entry + (words(service.command) if service.command is not None else default)
    if not command:
        raise SpecError(f"service {name!r} has no command, and neither has its image: name one.")
    frame = frame_of(name, service, config)
    test = _test(service, config)
    port = None if test else service.port or only_port(config)
    if not test and port is None:
        raise SpecError(
            f"nothing says when service {name!r} is ready: give it a healthcheck or a port, so that no call meets it "
            "half started."
        )
    return ServerOrder(
        name=f"service {name}",
        command=frame.shell_text(command),
        port=port,
        environment={},
        workdir="/",
        ready="tcp",
        ready_s=service.ready_s,
        health=frame.shell_text(test) if test else "",
    )


def _test(service: Service, config: Mapping[str, Any]) -> list[str]:
    """Return the command of a service's health check; empty if it has none."""
    check = service.healthcheck
    if isinstance(check, str):
        return ["/bin/sh", "-c", check]
    form, *rest = check or tuple((config.get("Healthcheck") or {}).get("Test") or ()) or ("NONE",)
    if form == "CMD-SHELL":
        return ["/bin/sh", "-c", " ".join(rest)]
    return rest if form == "CMD" else []
