"""The one door to the Docker SDK. Methods block: call them in a thread. Each has an end (`TIMEOUT_S`)."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount

from sandboxes.container.boot_scripts import BOX
from sandboxes.errors import SandboxError, SpecError
from sandboxes.spec import Limits

TIMEOUT_S = 60.0
GONE_S = 20.0
PAUSES_S = (0.1, 0.5)
"""Between tries of what may safely be asked again."""
INSTANCE, SANDBOX, PLACE, HOST, ROOT = (f"forkpoint.{name}" for name in ("instance", "sandbox", "data", "host", "root"))
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "AUDIT_WRITE", "SETFCAP",
)  # fmt: skip
"""Docker's own default less NET_RAW and MKNOD: what package managers need inside a root of their own."""
ANCHOR_PIDS = 4
"""What the container's own start takes of its pids."""


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A running container. upper, lowers: its directories on the daemon's machine, the lowers topmost first."""

    id: str
    pid: int
    upper: str
    lowers: tuple[str, ...]


class Daemon:
    """A Docker daemon, by socket or by DOCKER_HOST and its kin. Connects at the first call."""

    def __init__(self) -> None:
        self.where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._client: docker.DockerClient | None = None

    def _docker(self) -> docker.DockerClient:
        if self._client is None:
            self._knock()
            try:
                self._client = docker.DockerClient.from_env(timeout=int(TIMEOUT_S), max_pool_size=32)
            except DockerException as error:
                # It has asked for the daemon's version; what went wrong then is the cause.
                cause = error.__cause__
                raise cause if isinstance(cause, requests.exceptions.RequestException) else error  # noqa: B904
        return self._client

    def _knock(self) -> None:
        """Connect for a moment: where nobody listens, the SDK would leave its socket open."""
        kind, _, path = self.where.partition("://")
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as end:
                end.settimeout(TIMEOUT_S)
                end.connect(path)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    # -- the machine -------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return what the daemon says of itself.

        Raises:
            SandboxError: it does not answer.
        """
        info: dict[str, Any] = self._again(lambda: self._docker().info())
        return info

    def image(self, name: str) -> str:
        """Return an image's id, which is a digest of its content and configuration.

        Raises:
            SpecError: the daemon has no such image.
        """
        found: str = self._again(lambda: self._docker().images.get(name), image=name).id
        return found

    def config(self, image: str) -> dict[str, Any]:
        """Return what an image's containers are started with by default: `Env`, `Cmd`, `WorkingDir`, `User` and so on.

        Raises:
            SpecError: the daemon has no such image.
        """
        found = self._again(lambda: self._docker().images.get(image), image=image)
        return {"Id": found.id, **(found.attrs.get("Config") or {})}

    # -- containers --------------------------------------------------------------------------------------------------

    def run(self, image: str, name: str, box: str, limits: Limits, labels: Mapping[str, str]) -> RunningContainer:
        """Create and start a container. 0.3 s on an idle machine.

        Raises:
            SpecError: the image is not there, or has no /bin/sh.
        """
        with self._errors(image):
            container = self._docker().containers.create(image, **_flags(name, box, limits, labels))
        try:
            with self._errors(image):
                container.start()
                container.reload()
        except BaseException:
            with contextlib.suppress(SandboxError, SpecError):
                self.remove(str(container.id))
            raise
        facts: dict[str, Any] = container.attrs or {}
        data = facts.get("GraphDriver", {}).get("Data") or {}
        lowers = tuple(data.get("LowerDir", "").split(":"))
        return RunningContainer(str(container.id), int(facts["State"]["Pid"]), data.get("UpperDir", ""), lowers)

    def remove(self, container: str) -> None:
        """Kill and remove a container and its volumes; return when it is gone."""
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(NotFound), self._errors():
                try:
                    self._docker().api.remove_container(container, force=True, v=True)
                except APIError as error:
                    # 409: it is being removed already, by the daemon itself; so look again.
                    if error.status_code != 409:
                        raise
            if not self._exists(container):
                return
            time.sleep(0.01)
        raise SandboxError(f"Docker did not remove container {container[:12]} within {GONE_S:.0f} s")

    def _exists(self, container: str) -> bool:
        try:
            with self._errors():
                self._docker().api.inspect_container(container)
        except NotFound:
            return False
        return True

    def labelled(self) -> list[tuple[str, dict[str, str]]]:
        """Return every container that some Forkpoint has made, with its labels."""
        filters = {"label": INSTANCE}
        listed = self._again(lambda: self._docker().api.containers(all=True, filters=filters))
        return [(entry["Id"], dict(entry.get("Labels") or {})) for entry in listed]

    # -- images ------------------------------------------------------------------------------------------------------

    def commit(self, container: str, labels: Mapping[str, str], name: tuple[str, str]) -> str:
        """Return the id of a new image: the container's files over its own image. 0.1 s and more by what they hold."""
        repository, tag = name
        changes = [f'LABEL {key}="{value}"' for key, value in labels.items()]
        with self._errors():
            made = self._docker().api.commit(container, repository=repository, tag=tag, changes=changes, pause=False)
        return str(made["Id"])

    def images(self) -> list[tuple[str, dict[str, str]]]:
        """Return every image that some Forkpoint has made, with its labels."""
        listed = self._again(lambda: self._docker().api.images(filters={"label": ROOT}))
        return [(entry["Id"], dict(entry.get("Labels") or {})) for entry in listed]

    def forget_image(self, image: str) -> None:
        """Remove an image, unless containers need it."""
        with contextlib.suppress(NotFound), self._errors():
            try:
                self._docker().api.remove_image(image, force=False, noprune=False)
            except APIError as error:
                if error.status_code != 409:
                    raise

    # -- errors ------------------------------------------------------------------------------------------------------

    def _again(self, ask: Callable[[], Any], image: str = "") -> Any:
        """Ask what changes nothing, and again where the daemon seems to be away for a moment."""
        for pause in PAUSES_S:
            try:
                with self._errors(image):
                    return ask()
            except SandboxError:
                time.sleep(pause)
        with self._errors(image):
            return ask()

    @contextlib.contextmanager
    def _errors(self, image: str = "") -> Iterator[None]:
        """Turn the SDK's errors into ours; `NotFound` of a container stays."""
        try:
            yield
        except ImageNotFound as error:
            raise SpecError(
                f"Docker has no image {image!r}: `docker pull {image}` it, or `docker import` or `docker build` it."
            ) from error
        except NotFound:
            raise
        except requests.exceptions.Timeout as error:
            raise SandboxError(
                f"the Docker daemon at {self.where} gave no answer within {TIMEOUT_S:.0f} s: it is overloaded or stuck"
                ". Look at `docker info` and its log; restart it if need be."
            ) from error
        except APIError as error:
            raise _of_daemon(str(error.explanation or error), image) from error
        except (DockerException, requests.exceptions.RequestException, OSError) as error:
            self._client = None
            raise SandboxError(
                f"no Docker daemon answers at {self.where} ({error}). Start it (`systemctl start docker`), let this "
                "user reach its socket, or set DOCKER_HOST."
            ) from error


def _of_daemon(said: str, image: str) -> SandboxError | SpecError:
    if "no space left" in said.lower():
        return SandboxError(f"the Docker daemon's disk is full: {said}. Free some: `docker system prune`, `df -h`.")
    if "/bin/sh" in said and ("no such file" in said or "not found" in said or "exec format" in said):
        return SpecError(f"image {image!r} has no /bin/sh that starts here: {said}")
    return SandboxError(f"Docker refused: {said}")


def _flags(name: str, box: str, limits: Limits, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return what a container may do and use. Their attacks: `tests/sandboxes/test_container_security.py`."""
    memory = f"{limits.memory_mb}m"
    return {
        "command": [f"{BOX}/start"],
        "entrypoint": ["/bin/sh"],
        "name": name,
        "hostname": "sandbox",
        "labels": dict(labels),
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": ["no-new-privileges"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "pids_limit": limits.pids + ANCHOR_PIDS,
        "mounts": [Mount(BOX, box, type="bind", read_only=True)],
        "log_config": LogConfig(type="none"),
        "healthcheck": {"test": ["NONE"]},
        # A container whose proxy was killed ends with its keeper; then nothing of it stays.
        "auto_remove": True,
        "working_dir": "/",
        "detach": True,
        "stdin_open": False,
        "tty": False,
    }
