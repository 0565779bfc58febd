"""Patterns: containers that Docker has started, as which others are started by the OCI runtime alone.

Docker starts a container in 120 ms of CPU time, of which its runtime takes 28. What Docker adds is a specification for
the runtime (`config.json`, OCI runtime specification) and the mount of an overlay. Both are the same for all containers
of one image and the same limits, but for some paths. So Docker starts one container, the pattern, and its specification
is used again. Only what Docker's own containers are known to have is used: anything else is left to Docker.
"""

import json
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import BOX
from sandboxes.container.daemon import RunningContainer
from sandboxes.ipc.launch_messages import ContainerStart

_RUNTIME = "runc"
"""The runtime that Docker has unless an operator chose another one, such as gVisor. No other one is used here."""

_OWN_NAMESPACES = {"mount", "network", "uts", "pid", "ipc", "cgroup"}
"""The kinds of namespaces that a container gets. With one of users, ids would have to be mapped in its layers."""

_MOUNTS = {"proc", "tmpfs", "devpts", "sysfs", "cgroup", "cgroup2", "mqueue"}
"""The file systems of a container that are made for it. The keeper unmounts all else, except for the box."""

_UNSUPPORTED = ("rootless", "userns", "selinux")
"""Kinds of protection of a daemon that take more than its specification: other users, or labels of each layer."""

_OVERLAY = ("upper", "work", "root")
"""The directories of a container's overlay: what is written, what overlayfs needs beside it, and the mount point."""


class UnfitError(Exception):
    """Containers cannot be started without Docker; the text says why."""


Runtime = tuple[str, ...]
"""The path of the OCI runtime that Docker uses, and its options."""


def runtime_of(info: Mapping[str, Any], data: Path) -> Runtime:
    """Return the runtime of a daemon.

    Args:
        info: The daemon's description of itself.
        data: The directory in which the containers' own directories will be.

    Raises:
        UnfitError: Only Docker can start its containers.
    """
    if (default := info.get("DefaultRuntime")) != _RUNTIME:
        raise UnfitError(f"Docker's runtime is {default!r} and not {_RUNTIME!r}")
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    if unsupported := next((name for name in _UNSUPPORTED if any(f"name={name}" in text for text in options)), None):
        raise UnfitError(f"Docker runs with {unsupported!r}")
    # Each of these separates directories of an overlay, or options (overlayfs.rst).
    if set(str(data)) & set(",:\\"):
        raise UnfitError(f"the path {data} has a comma, a colon or a backslash")
    docker = Path(info.get("DockerRootDir") or "/var/lib/docker")
    # Otherwise files of the image would be on another device than what the container writes, and programs such as
    # `tar --one-file-system` would leave them out.
    if not docker.is_dir() or docker.stat().st_dev != data.stat().st_dev:
        raise UnfitError(f"{data} is on another file system than Docker's files in {docker}")
    entry = (info.get("Runtimes") or {}).get(_RUNTIME) or {}
    path = shutil.which(entry.get("path") or _RUNTIME)
    if path is None:
        raise UnfitError(f"there is no {_RUNTIME!r} here")
    return (path, "--systemd-cgroup") if info.get("CgroupDriver") == "systemd" else (path,)


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a container of Docker's tells of how to start others.

    Attributes:
        container: The container.
        runtime: What starts the others.
        specification: The container's `config.json`.
        overlay: Options of its overlay mount, without the directories that are its own.
        storage: The directory of Docker's layers, to which the options name them relative.
    """

    container: RunningContainer
    runtime: Runtime
    specification: Mapping[str, Any]
    overlay: tuple[str, ...]
    storage: Path

    def prepare(self, box: Path, folder: Path, name: str) -> ContainerStart:
        """Write what the runtime needs to start a container. 1 ms.

        Args:
            box: The directory that the container sees as its box.
            folder: The container's directory, which is made here.
            name: What the runtime calls the container.

        Raises:
            OSError: The disk is full or fails.
        """
        # For root alone: an agent may write programs with a set-user-id bit, which no user of this machine may run.
        folder.mkdir(mode=0o700)
        for part in _OVERLAY:
            (folder / part).mkdir(mode=0o755)
        spec, linux = self.specification, self.specification["linux"]
        config = {
            **spec,
            "root": {**spec["root"], "path": str(folder / "root")},
            "mounts": [
                {**mount, "source": str(box)} if mount["destination"] == BOX else mount for mount in spec["mounts"]
            ],
            "linux": {**linux, "cgroupsPath": _group(linux["cgroupsPath"], name)},
        }
        (folder / "config.json").write_text(json.dumps(config))
        # `volatile`: without it, the end of each container would sync the file system of all of them (overlayfs.rst).
        options = [*self.overlay, f"upperdir={folder}/upper", f"workdir={folder}/work", "volatile"]
        return ContainerStart(
            list(self.runtime), str(folder), str(self.storage), ",".join(options),
            _plain_group(config),
            pattern=self.container.pid, pattern_container=self.container.id,
        )  # fmt: skip


def read_pattern(container: RunningContainer, runtime: Runtime) -> Pattern:
    """Return the pattern that a container is. 1 ms.

    Args:
        container: A container that Docker has just started.
        runtime: Docker's runtime.

    Raises:
        UnfitError: It has something that is not known here, or what it is cannot be read.
    """
    try:
        specification = json.loads((_bundle(container.pid) / "config.json").read_bytes())
        storage = Path(container.upper).parents[1]
        overlay = _overlay(container.pid, storage)
        limits = _limits(container.pid)
    except (OSError, ValueError, IndexError) as error:
        raise UnfitError(f"what Docker's container is cannot be read: {error}") from error
    specification = _checked(specification)
    if not specification["process"].get("rlimits"):
        # Docker's containers inherit the daemon's; these would inherit the proxy's.
        specification["process"]["rlimits"] = limits
    return Pattern(container, runtime, specification, overlay, storage)


def _bundle(pid: int) -> Path:
    """Return the directory of a container's specification: the working directory of containerd's shim, its parent."""
    status = Path(f"/proc/{pid}/status").read_text()
    parent = next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1]
    return Path(f"/proc/{parent}/cwd")


def _overlay(pid: int, storage: Path) -> tuple[str, ...]:
    """Return the options of the overlay that is a container's root, without its upper and its work directory.

    Layers are relative to Docker's directory: mount(2) takes 4,096 bytes, and an image has up to 127 layers.
    """
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        mount, _, super_block = line.partition(" - ")
        if mount.split()[4] == "/":
            kind, _, options = super_block.split(" ")[:3]
            if kind != "overlay" or "\\" in options:
                raise UnfitError("the root of Docker's container is no overlay of plain paths")
            own = ("upperdir=", "workdir=", "rw", "ro")
            return tuple(
                option.replace(f"{storage}/", "") for option in options.split(",") if not option.startswith(own)
            )
    raise UnfitError("Docker's container has no root")


def _limits(pid: int) -> list[dict[str, Any]]:
    """Return the resource limits of a process in the form of a specification."""
    found = []
    for name in ("CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC", "RSS",
                 "RTPRIO", "RTTIME", "SIGPENDING", "STACK", "AS"):  # fmt: skip
        soft, hard = resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}"))
        # Python's infinity is -1, the specification's is an unsigned number of 64 bits.
        found.append({"type": f"RLIMIT_{name}", "soft": soft % (1 << 64), "hard": hard % (1 << 64)})
    return found


def _checked(specification: dict[str, Any]) -> dict[str, Any]:
    """Return a specification with only those mounts that each container gets.

    Raises:
        UnfitError: It has what only Docker knows how to make.
    """
    linux, process = specification.get("linux") or {}, specification.get("process") or {}
    namespaces = linux.get("namespaces") or ()
    if any(entry.get("type") not in _OWN_NAMESPACES or entry.get("path") for entry in namespaces):
        raise UnfitError("Docker's container shares a namespace")
    if any((specification.get("hooks") or {}).values()):
        raise UnfitError("Docker has programs run at the start of a container")
    if process.get("selinuxLabel") or linux.get("mountLabel"):
        raise UnfitError("Docker's container has a label of SELinux")
    if not linux.get("seccomp") or not linux.get("cgroupsPath") or not specification.get("root"):
        raise UnfitError("the specification of Docker's container is not one that is known here")
    mounts = [
        mount for mount in specification.get("mounts") or ()
        if mount["destination"] == BOX or mount.get("type") in _MOUNTS
    ]  # fmt: skip
    if sum(mount["destination"] == BOX for mount in mounts) != 1:
        raise UnfitError("Docker's container has no box")
    return {**specification, "mounts": mounts}


def group_of(folder: Path) -> str:
    """Return the path of the control groups of a container, given its directory; empty if it has none to remove."""
    try:
        return _plain_group(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError):
        # The proxy was killed before it had written the file.
        return ""


def _plain_group(specification: Mapping[str, Any]) -> str:
    path = str(specification["linux"]["cgroupsPath"])
    return "" if ":" in path else path


def _group(path: str, name: str) -> str:
    """Return the control group of a container of a name, beside the one of the pattern."""
    # Systemd's form is `slice:prefix:name`, and the path's last part is the name otherwise.
    separator = ":" if ":" in path else "/"
    return f"{path.rpartition(separator)[0]}{separator}{name}"
