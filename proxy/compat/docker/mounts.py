"""What a create request mounts: volumes of a project, and directories of the client's machine (pure).

Nothing of the client's machine is mounted: the proxy may run elsewhere, and a state must not change from outside.
Published tasks mount directories to get logs out. Such a directory is an empty one of the state, which `docker cp` and
the files of the REST API read. What comes in by a mount has to be copied in.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from proxy.refusals import RefusalError
from sandboxes.local.service_commands import absolute, is_system, making

_COPY = "Put the files into the image, or copy them in with `docker cp` or `docker compose cp`."


class Mounts(NamedTuple):
    """What a container mounts: volumes, paths of empty `folders`, memory file systems and read-only volumes."""

    volumes: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()

    def setup(self, below: str = "") -> tuple[str, ...]:
        """Return the commands that make the directories, below a directory of the sandbox."""
        return making((below + path for path in self.folders), (below + path for path in self.memory))


def mounts_of(host: Mapping[str, Any]) -> Mounts:
    """Return what `HostConfig` mounts, without anonymous volumes. Raises RefusalError (400) for what it cannot."""
    volumes, folders, read_only_paths = list[tuple[str, str]](), set[str](), list[str]()
    for source, target, read_only in _entries(host):
        if "/" not in source and source not in {".", ".."}:
            read_only_paths += [target] if read_only else []
            volumes.append((source, target))
            continue
        path = absolute(source)
        if read_only or not source.startswith("/") or is_system(path):
            raise RefusalError(
                400, "docker", f"{source} at {target}: Forkpoint mounts nothing of the client's machine, and a "
                f"directory {'that is read-only' if read_only else 'of the system'} is mounted for its files. {_COPY}",
            )  # fmt: skip
        folders.add(_target(target))
    memory = {_target(str(path)) for path in host.get("Tmpfs") or ()}
    memory |= {_target(str(mount["Target"])) for mount in host.get("Mounts") or () if mount.get("Type") == "tmpfs"}
    return Mounts(tuple(volumes), tuple(sorted(folders)), tuple(sorted(memory)), tuple(read_only_paths))


def _entries(host: Mapping[str, Any]) -> Iterable[tuple[str, str, bool]]:
    """Yield source, target and whether it is read-only, of each mount that has a source."""
    for bind in host.get("Binds") or ():
        source, _, rest = str(bind).partition(":")
        target, _, options = rest.partition(":")
        yield source, target, "ro" in options.split(",")
    for mount in host.get("Mounts") or ():
        kind, source, target = (str(mount.get(key) or "") for key in ("Type", "Source", "Target"))
        if kind not in {"volume", "tmpfs", "bind"} or (mount.get("VolumeOptions") or {}).get("Subpath"):
            raise RefusalError(400, "docker", f"A mount of type {kind!r} at {target}: Forkpoint has none. {_COPY}")
        if kind != "tmpfs" and source:
            yield source, target, bool(mount.get("ReadOnly"))


def _target(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise RefusalError(400, "docker", f"{path!r} is no absolute path in a container.")
    return absolute(path)


_WITHOUT_EFFECT = {
    "Privileged": "containers have no rights over the machine.",
    "CapAdd": "containers have the capabilities of all sandboxes.",
    "SecurityOpt": "containers have the security profile of all sandboxes.",
    "Ulimits": "processes have the limits of all sandboxes.",
    "Sysctls": "kernel parameters are those of all sandboxes.",
    "ReadonlyRootfs": "the files of a container are writable.",
    "ExtraHosts": "there is no way to other hosts. Names that lead to 127.0.0.1 are known in projects.",
}
"""Members of HostConfig that a container does without, and what a program may notice."""


def notes_of(host: Mapping[str, Any]) -> list[str]:
    """Return what a client should know of a request that is not taken word for word."""
    mounts = mounts_of(host)
    notes = [
        f"{folder} is an empty directory of the container: nothing of the client's machine is mounted. Read it with "
        "`docker cp`."
        for folder in mounts.folders
    ]
    notes += [f"{path} is writable: volumes are directories of the state." for path in mounts.read_only]
    notes += [
        f"HostConfig.{member} has no effect: {why}" for member, why in _WITHOUT_EFFECT.items() if host.get(member)
    ]
    if host.get("NetworkMode") == "host":
        notes.append("The network of the host is not reached: a container has one without a way out.")
    notes += [
        f"HostConfig.{member} has no effect: nothing of the machine is shared with a container."
        for member in ("PidMode", "IpcMode")
        if host.get(member) == "host"
    ]
    if host.get("PortBindings"):
        notes.append("No port is published: containers of a project reach each other, and clients use `docker exec`.")
    return notes
