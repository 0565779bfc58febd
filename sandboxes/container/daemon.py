"""The Docker daemon. This is the only module that uses the Docker SDK.

All methods block, for at most `TIMEOUT_S` a request: call them in a thread. The SDK's exceptions become ours here: an
image that cannot be used is the spec's fault (`SpecError`), everything else the machine's (`SandboxError`).
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount

from sandboxes.container.boot_scripts import BOX
from sandboxes.container.seccomp import profile
from sandboxes.errors import SandboxError, SpecError
from sandboxes.spec import Limits

TIMEOUT_S = 60.0
"""Limit of one request to the daemon, which needs milliseconds, and seconds only on a machine under heavy load.

The value is an estimate.
"""

GONE_S = 20.0
"""Longest wait until a container that was removed is gone. The value is an estimate."""

PAUSES_S = (0.1, 0.5)
"""Pauses before a request that changes nothing is repeated: a daemon that restarts is away for about this long.

The value is an estimate.
"""

INSTANCE, SANDBOX, DATA_DIR, HOST, ROOT = (
    f"forkpoint.{name}" for name in ("instance", "sandbox", "data", "host", "root")
)
"""Labels of containers and images: the instance, sandbox, data directory, host name and root state they belong to."""

CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "SETFCAP",
)  # fmt: skip
"""Docker's default capabilities without NET_RAW, MKNOD and AUDIT_WRITE; package managers need the rest."""

_IPV6 = Path("/proc/sys/net/ipv6")
"""Exists if this machine's kernel has IPv6. The driver runs on the daemon's machine."""

ENDED_S = 2
"""How long Docker may take to remove a container that has ended: 0.07 s on an idle machine.

The value is an estimate.
"""

ANCHOR_PIDS = 4
"""Processes of the container's own start, which are added to the spec's limit: pid 1, tini, the anchor and its fork."""


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container that was started.

    Attributes:
        id: Docker's id of it.
        pid: Its pid 1, as this machine numbers it.
        upper: The directory of what it writes; empty if Docker does not report it.
        lowers: The directories of its image, topmost first.
    """

    id: str
    pid: int
    upper: str
    lowers: tuple[str, ...]


class Daemon:
    """A Docker daemon, on its default socket or as DOCKER_HOST and its sister variables say.

    Attributes:
        where: The daemon's address, for error texts.
    """

    def __init__(self) -> None:
        """Connect not yet: the first method does."""
        self.where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._client: docker.DockerClient | None = None

    def _docker(self) -> docker.DockerClient:
        if self._client is None:
            self._check_listener()
            try:
                # 32 connections, because each thread that starts or removes a container holds one; the default of 10
                # would drop the others after use.
                self._client = docker.DockerClient.from_env(timeout=int(TIMEOUT_S), max_pool_size=32)
            except DockerException as error:
                # The client has requested the daemon's version. If that failed, the cause has the reason.
                cause = error.__cause__
                raise cause if isinstance(cause, requests.exceptions.RequestException) else error  # noqa: B904
        return self._client

    def _check_listener(self) -> None:
        """Connect for a moment, because the SDK leaves its socket open if no daemon listens."""
        # TCP and SSH addresses are left to the SDK.
        kind, _, path = self.where.partition("://")
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as end:
                end.settimeout(TIMEOUT_S)
                end.connect(path)

    def close(self) -> None:
        """Close the connections; the next method connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # -- the machine -------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return the daemon's description of itself (`docker info`).

        Raises:
            SandboxError: No daemon responds.
        """
        info: dict[str, Any] = self._retried(lambda: self._docker().info())
        return info

    def image(self, name: str) -> str:
        """Return an image's id, which is a digest of its content and configuration.

        Raises:
            SpecError: The daemon has no such image.
        """
        return str(self._retried(lambda: self._docker().images.get(name), image=name).id)

    def config(self, image: str) -> dict[str, Any]:
        """Return an image's configuration: `Env`, `Cmd`, `WorkingDir`, `User` and so on, with its `Id`.

        Raises:
            SpecError: The daemon has no such image.
        """
        loaded = self._retried(lambda: self._docker().images.get(image), image=image)
        return {"Id": loaded.id, **(loaded.attrs.get("Config") or {})}

    def layer(self, image: str) -> tuple[str, Path | None]:
        """Return what an image of Forkpoint's making adds to the image that it was made of.

        Returns:
            The id of the image below, and the directory that has the topmost layer in `diff`. For an image that
            Forkpoint did not make: its own id and None.

        Raises:
            SpecError: The daemon has no such image.
            SandboxError: Docker failed.
        """
        loaded = self._retried(lambda: self._docker().images.get(image), image=image)
        if ROOT not in loaded.labels:
            return str(loaded.id), None
        return str(loaded.attrs["Parent"]), Path(loaded.attrs["GraphDriver"]["Data"]["UpperDir"]).parent

    def tags(self) -> list[str]:
        """Return the names of all images, without those that Forkpoint made."""
        listed = self._retried(lambda: self._docker().api.images(all=False))
        names = [tag for entry in listed if ROOT not in (entry.get("Labels") or {}) for tag in entry["RepoTags"] or ()]
        return sorted(name for name in names if name != "<none>:<none>")

    # -- containers --------------------------------------------------------------------------------------------------

    def run(self, image: str, name: str, box: str, limits: Limits, labels: Mapping[str, str]) -> RunningContainer:
        """Create and start a container, in 0.1 s on an idle machine.

        Args:
            image: The image.
            name: The container's name.
            box: The directory that the container sees as its box.
            limits: What its processes may use together.
            labels: The container's labels.

        Raises:
            SpecError: Docker has no such image, or it has no /bin/sh.
            SandboxError: Docker failed.
        """
        with self._errors(image):
            # Not `_retried`: a request that timed out may have succeeded, and its repetition would make a second
            # container. The sweep removes the first one by its label.
            container = self._docker().containers.create(image, **_flags(name, box, limits, labels))
        try:
            with self._errors(image):
                container.start()
                # Only a running container has a pid, and the overlay directories are known once it is created.
                container.reload()
        # The caller does not know this container yet, so no other code would remove it before the next sweep.
        except BaseException:
            with contextlib.suppress(SandboxError, SpecError):
                self.remove(str(container.id))
            raise
        facts: dict[str, Any] = container.attrs or {}
        data = facts.get("GraphDriver", {}).get("Data") or {}
        lowers = tuple(data.get("LowerDir", "").split(":"))
        return RunningContainer(str(container.id), int(facts["State"]["Pid"]), data.get("UpperDir", ""), lowers)

    def remove(self, container: str, *, is_ending: bool = False) -> None:
        """Kill and remove a container and its volumes; return when it is gone.

        Args:
            container: Docker's id of it.
            is_ending: Its pid 1 has been killed, so that Docker removes it without a request (`auto_remove`).

        Raises:
            SandboxError: Docker failed, or the container is still there after `GONE_S`.
        """
        # A request would start a program that kills the container, also a dead one: a quarter of the CPU time.
        if is_ending and self._is_removed(container):
            return
        deadline = time.monotonic() + GONE_S
        # The request returns early if the daemon itself is removing the container, so the end is checked.
        while time.monotonic() < deadline:
            with contextlib.suppress(NotFound), self._errors():
                try:
                    self._docker().api.remove_container(container, force=True, v=True)
                except APIError as error:
                    # 409: the daemon is removing it already, because of `auto_remove`. Check again.
                    if error.status_code != 409:
                        raise
            if not self._exists(container):
                return
            time.sleep(0.01)
        raise SandboxError(f"Docker did not remove container {container[:12]} within {GONE_S:.0f} s")

    def _is_removed(self, container: str) -> bool:
        """Return whether a container is gone within `ENDED_S`."""
        try:
            self._docker().api.wait(container, timeout=ENDED_S, condition="removed")
        except NotFound:
            return True
        # Also a request that takes too long.
        except (DockerException, requests.exceptions.RequestException, OSError):
            return False
        return True

    def _exists(self, container: str) -> bool:
        try:
            with self._errors():
                self._docker().api.inspect_container(container)
        except NotFound:
            return False
        return True

    def labelled(self) -> list[tuple[str, dict[str, str]]]:
        """Return all containers that any Forkpoint instance made, with their labels."""
        # The label's existence, not its value: containers of other instances whose process died are removed as well.
        filters = {"label": INSTANCE}
        listed = self._retried(lambda: self._docker().api.containers(all=True, filters=filters))
        return [(entry["Id"], dict(entry.get("Labels") or {})) for entry in listed]

    def copy_image(self, image: str, container: str, path: str, *, labels: Mapping[str, str]) -> None:
        """Copy all files of an image into a directory of a running container. 0.3 s, and more for many files.

        Args:
            image: The image.
            container: The container.
            path: An existing directory in it.
            labels: Labels of the container of the image, which exists for as long as this takes and is not started.

        Raises:
            SpecError: Docker has no such image.
            SandboxError: Docker failed.
        """
        with self._errors(image):
            source = self._docker().containers.create(image, ["-"], network_mode="none", labels=dict(labels))
        try:
            with self._errors(image):
                # Dockerd reads and writes with the container's directory as its root, so no link leads out of it.
                self._docker().api.put_archive(container, path, source.export())
        finally:
            self.remove(str(source.id))

    # -- images ------------------------------------------------------------------------------------------------------

    def commit(self, container: str, labels: Mapping[str, str], name: tuple[str, str]) -> str:
        """Make an image of a container's files over its own image; return its id. 0.1 s, or more for many files."""
        repository, tag = name
        changes = [f'LABEL {key}="{value}"' for key, value in labels.items()]
        with self._errors():
            # Not paused: pausing needs the freezer control group, and only set-up's own processes can run in this
            # container.
            made = self._docker().api.commit(container, repository=repository, tag=tag, changes=changes, pause=False)
        return str(made["Id"])

    def images(self) -> list[tuple[str, dict[str, str]]]:
        """Return all images that any Forkpoint instance made, with their labels."""
        listed = self._retried(lambda: self._docker().api.images(filters={"label": ROOT}))
        return [(entry["Id"], dict(entry.get("Labels") or {})) for entry in listed]

    def forget_image(self, image: str) -> None:
        """Remove an image, unless a container uses it."""
        with contextlib.suppress(NotFound), self._errors():
            try:
                self._docker().api.remove_image(image, force=False, noprune=False)
            except APIError as error:
                # 409: a container uses the image.
                if error.status_code != 409:
                    raise

    # -- errors ------------------------------------------------------------------------------------------------------

    def _retried(self, request: Callable[[], Any], image: str = "") -> Any:
        """Send a request that changes nothing; repeat it if the daemon seems to be away for a moment."""
        # Only SandboxError is repeated. A SpecError, such as a missing image, is the daemon's answer.
        for pause in PAUSES_S:
            try:
                with self._errors(image):
                    return request()
            except SandboxError:
                time.sleep(pause)
        with self._errors(image):
            return request()

    @contextlib.contextmanager
    def _errors(self, image: str = "") -> Iterator[None]:
        """Turn the SDK's errors into ours, except `NotFound` for a container, which callers handle."""
        try:
            yield
        except ImageNotFound as error:
            raise SpecError(
                f"Docker has no image {image!r}: `docker pull {image}` it, or `docker import` or `docker build` it."
            ) from error
        # ImageNotFound is a subclass of NotFound, so it has to come first.
        except NotFound:
            raise
        except requests.exceptions.Timeout as error:
            raise SandboxError(
                f"the Docker daemon at {self.where} gave no response within {TIMEOUT_S:.0f} s: it is overloaded or "
                "stuck. Look at `docker info` and its log; restart it if necessary."
            ) from error
        except APIError as error:
            raise _error_of(str(error.explanation or error), image) from error
        except (DockerException, requests.exceptions.RequestException, OSError) as error:
            # The next request connects again, to a daemon that may have been restarted.
            self._client = None
            raise SandboxError(
                f"no Docker daemon responds at {self.where} ({error}). Start it (`systemctl start docker`), let this "
                "user reach its socket, or set DOCKER_HOST."
            ) from error


def _error_of(explanation: str, image: str) -> SandboxError | SpecError:
    """Return the error for a request that the daemon refused."""
    if "no space left" in explanation.lower():
        return SandboxError(
            f"the Docker daemon's disk is full: {explanation}. Free some space: `docker system prune`, `df -h`."
        )
    if "/bin/sh" in explanation and any(text in explanation for text in ("no such file", "not found", "exec format")):
        return SpecError(f"image {image!r} has no /bin/sh that starts here: {explanation}")
    return SandboxError(f"Docker refused: {explanation}")


def _flags(name: str, box: str, limits: Limits, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that limit a container; tests/sandboxes/container/test_security.py attacks them."""
    # Equal limits for memory and memory with swap mean no swap. A process that swaps would be slow instead of failing.
    memory = f"{limits.memory_mb}m"
    return {
        "command": [f"{BOX}/start"],
        "entrypoint": ["/bin/sh"],
        "name": name,
        "hostname": "sandbox",
        "labels": dict(labels),
        # A network would be an effect that no snapshot holds. Only loopback exists in the container.
        "network_mode": "none",
        # The container gets an empty network namespace from the runtime alone. Otherwise dockerd sets up a network of
        # its own without interfaces, by a second program of its size: half of the time of a start. The keeper looks
        # that only loopback is there.
        "network_disabled": True,
        # As in a network of Docker's: `localhost` is one address.
        "sysctls": {"net.ipv6.conf.all.disable_ipv6": "1"} if _IPV6.exists() else {},
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        # Programs with a set-user-id bit get no further rights (prctl(2), PR_SET_NO_NEW_PRIVS).
        "security_opt": ["no-new-privileges", f"seccomp={profile()}"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "pids_limit": limits.pids + ANCHOR_PIDS,
        # Read-only protects the names and the programs. A FIFO can be written to all the same, because its data is not
        # on the file system.
        "mounts": [Mount(BOX, box, type="bind", read_only=True)],
        # The keeper reads all output. Docker's log would keep a second copy on the disk, without a limit.
        "log_config": LogConfig(type="none"),
        # An image's health check would run commands at times of its own, and each would look like an effect of a call.
        "healthcheck": {"test": ["NONE"]},
        # A container whose proxy was killed ends with its keeper; Docker then removes it without us.
        "auto_remove": True,
        "working_dir": "/",
        "detach": True,
        "stdin_open": False,
        "tty": False,
    }
