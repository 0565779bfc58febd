"""A Docker daemon as a source of images. This is the only module of the room that uses the Docker SDK.

All methods block, up to `TIMEOUT_S` a request, or `TRANSFER_S` for whole images: call them in a thread. Here the SDK's
exceptions become `SpecError` for an image that cannot be used, and `SandboxError` for everything else.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import docker
import requests
from docker.errors import APIError, DockerException, ImageLoadError, ImageNotFound, NotFound

from sandboxes.errors import SandboxError, SpecError

TIMEOUT_S = 60.0
"""Limit of one request to the daemon, which needs milliseconds, and seconds only on a machine under heavy load. The
value is an estimate."""

TRANSFER_S = 3_600.0
"""Longest silence of the daemon while it reads or writes an image: `docker save` is silent until it has copied all
layers. The value is an estimate."""

PAUSES_S = (0.1, 0.5)
"""Pauses before a request that changes nothing is repeated: a daemon that restarts is away for about this long. The
value is an estimate."""

PIN, PIN_HOST = "forkpoint.pin", "forkpoint.pin.host"
"""Labels of the containers that only keep an image: the folder whose images they keep, and its machine's name."""

_PIECE_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DaemonImage:
    """An image of the daemon's."""

    id: str
    config: object
    platform: dict[str, str]
    # Their directories on the daemon's machine, topmost first; empty if not kept as directories for overlayfs.
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImagePin:
    """A container that keeps an image: its name, the id of the image, and the folder that it keeps the image for."""

    name: str
    image: str
    owner: str


class ImageDaemon:
    """A Docker daemon, on its default socket or as DOCKER_HOST and its sister variables say."""

    def __init__(self) -> None:
        """Connect not yet: the first method does."""
        self.where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._clients: dict[float, docker.DockerClient] = {}

    def close(self) -> None:
        """Close the connections; the next method connects again."""
        while self._clients:
            self._clients.popitem()[1].close()

    def check(self) -> dict[str, Any]:
        """Return the daemon's description of itself (`docker info`). Asked once: no start waits for it."""
        with self._errors():
            return self._docker().info()

    # -- images ------------------------------------------------------------------------------------------------------

    def image(self, name: str) -> DaemonImage:
        """Return what the daemon says of an image."""
        facts: dict[str, Any] = self._retried(lambda: self._docker().images.get(name).attrs, image=name)
        driver = facts.get("GraphDriver") or {}
        data = (driver.get("Data") or {}) if driver.get("Name") == "overlay2" else {}
        layers = [data.get("UpperDir") or "", *(data.get("LowerDir") or "").split(":")]
        platform = {"os": facts.get("Os", ""), "architecture": facts.get("Architecture", "")}
        return DaemonImage(str(facts["Id"]), facts.get("Config"), platform, tuple(filter(None, layers)))

    def tags(self) -> list[str]:
        """Return the names of all images."""
        listed = self._retried(lambda: self._docker().api.images(all=False))
        return sorted({tag for entry in listed for tag in entry["RepoTags"] or () if tag != "<none>:<none>"})

    def save(self, image: str, target: BinaryIO) -> None:
        """Write an image as `docker save` does."""
        with self._errors(image):
            pieces = iter(self._patient().api.get_image(image, chunk_size=_PIECE_BYTES))
        while (piece := self._next(pieces, image)) is not None:
            target.write(piece)

    def _next(self, pieces: Iterator[bytes], image: str) -> bytes | None:
        # One piece at a time: an error of the disk that they are written to is not the daemon's.
        with self._errors(image):
            return next(pieces, None)

    def load(self, archive: Iterator[bytes]) -> None:
        """Take over the images of an archive, as `docker load` does, with the names that it has for them."""
        with self._errors():
            # The SDK's words are that it takes bytes. Its connection takes pieces too, and reads the whole response.
            self._patient().images.load(cast("bytes", archive))

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, image: str, name: str, owner: str, host: str) -> None:
        """Keep the layers of an image while a container exists, which is made of it and never started. Idempotent."""
        # Docker then keeps the layers when the image is removed, also by force, but not when all stopped containers are
        # removed (`docker container prune`).
        labels = {PIN: owner, PIN_HOST: host}
        with self._errors(image):
            try:
                self._docker().containers.create(image, ["-"], name=name, network_mode="none", labels=labels)
            except APIError as error:
                # 409: it exists.
                if error.status_code != 409:
                    raise

    def pins(self, host: str) -> list[ImagePin]:
        """Return the containers that keep images for folders of a machine."""
        filters = {"label": [PIN, f"{PIN_HOST}={host}"]}
        listed = self._retried(lambda: self._docker().api.containers(all=True, filters=filters))
        return [
            ImagePin(entry["Names"][0].lstrip("/"), str(entry["ImageID"]), entry["Labels"][PIN]) for entry in listed
        ]

    def unpin(self, name: str) -> None:
        """Remove a container that keeps an image. Idempotent."""
        with contextlib.suppress(NotFound), self._errors():
            self._docker().api.remove_container(name, force=True, v=True)

    # -- the connection ----------------------------------------------------------------------------------------------

    def _docker(self) -> docker.DockerClient:
        if TIMEOUT_S not in self._clients:
            self._check_listener()
            try:
                self._clients[TIMEOUT_S] = docker.DockerClient.from_env(timeout=int(TIMEOUT_S))
            except DockerException as error:
                # The client has requested the daemon's version. If that failed, the cause has the reason.
                cause = error.__cause__
                raise cause if isinstance(cause, requests.exceptions.RequestException) else error  # noqa: B904
        return self._clients[TIMEOUT_S]

    def _patient(self) -> docker.DockerClient:
        """Return a client that waits for `TRANSFER_S`, but not to learn the daemon's version."""
        if TRANSFER_S not in self._clients:
            version = self._docker().api.api_version
            self._clients[TRANSFER_S] = docker.DockerClient.from_env(version=version, timeout=int(TRANSFER_S))
        return self._clients[TRANSFER_S]

    def _check_listener(self) -> None:
        """Connect for a moment, because the SDK leaves its socket open if no daemon listens."""
        # TCP and SSH addresses are left to the SDK.
        kind, _, path = self.where.partition("://")
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as end:
                end.settimeout(TIMEOUT_S)
                end.connect(path)

    def _retried(self, request: Callable[[], _T], image: str = "") -> _T:
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
        except NotFound as error:
            if not image:
                raise
            raise SpecError(f"Docker has no image {image!r}: {error.explanation}") from error
        except requests.exceptions.Timeout as error:
            raise SandboxError(
                f"the Docker daemon at {self.where} gave no response within {TIMEOUT_S:.0f} s: it is overloaded or "
                "stuck. Look at `docker info` and its log; restart it if necessary."
            ) from error
        except (APIError, ImageLoadError) as error:
            raise _error_of(str(getattr(error, "explanation", None) or error)) from error
        except (DockerException, requests.exceptions.RequestException, OSError) as error:
            # The next request connects again, to a daemon that may have been restarted.
            self.close()
            raise SandboxError(
                f"no Docker daemon responds at {self.where} ({error}). Start it (`systemctl start docker`), let this "
                "user reach its socket, or set DOCKER_HOST."
            ) from error


def _error_of(explanation: str) -> SandboxError:
    if "no space left" in explanation.lower():
        return SandboxError(
            f"the Docker daemon's disk is full: {explanation}. Free some space: `docker system prune`, `df -h`."
        )
    return SandboxError(f"Docker refused: {explanation}")
