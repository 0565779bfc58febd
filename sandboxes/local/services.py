"""The side services of a sandbox: programs of other images that run beside the calls, in the same sandbox.

Theory of operation. The files of each service's image are a layer of the base, with all paths below `SERVICES`. A
service is a process with that directory as its root (chroot(2)), started by the anchor like a tool server, so all of
the sandbox holds for it: limits, loopback, effects, layers and checkpoints. Each such directory has a /proc, a /dev, a
/sys (`linux.mounts.mount_for_services`), and names in /etc/hosts (`image_dress`).
"""

from collections.abc import Iterator, Mapping

from sandboxes.errors import SpecError
from sandboxes.images.config import ImageConfig
from sandboxes.ipc.launch_messages import ServiceMounts
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.local.service_commands import SERVICES, frame_of, only_port
from sandboxes.server_spec import MAIN, Service, start_order, words
from sandboxes.spec import EnvironmentSpec


def mounts_of(spec: EnvironmentSpec) -> ServiceMounts:
    """Return the mounts of a spec's services (pure)."""
    roots = [f"{SERVICES}/{name}" for name in sorted(spec.services)]
    return ServiceMounts(roots, [list(pair) for pair in shared(spec)])


def shared(spec: EnvironmentSpec) -> Iterator[tuple[str, str]]:
    """Yield the directory and the mount point of each further user of a volume, as paths of the sandbox."""
    for users in spec.volumes.values():
        (source, *targets) = [path if user == MAIN else f"{SERVICES}/{user}{path}" for user, path in users.items()]
        for target in targets:
            yield source, target


def service_orders(spec: EnvironmentSpec, configs: Mapping[str, ImageConfig]) -> list[ServerOrder]:
    """Return what starts the services of a spec, in the order in which they start (pure)."""
    return [_order(name, spec.services[name], configs[name]) for name in start_order(spec.services)]


def _order(name: str, service: Service, config: ImageConfig) -> ServerOrder:
    entry = words(service.entrypoint) if service.entrypoint is not None else list(config.entrypoint)
    default = [] if service.entrypoint is not None else list(config.command)
    command = entry + (words(service.command) if service.command is not None else default)
    if not command:
        raise SpecError(f"service {name!r} has no command, and neither has its image: name one.")
    frame = frame_of(name, service, config)
    test = _test(service, config)
    port = None if test else service.port or only_port(config.ports)
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


def _test(service: Service, config: ImageConfig) -> list[str]:
    check = service.healthcheck
    if isinstance(check, str):
        return ["/bin/sh", "-c", check]
    form, *rest = check or config.healthcheck or ("NONE",)
    if form == "CMD-SHELL":
        return ["/bin/sh", "-c", " ".join(rest)]
    return rest if form == "CMD" else []
