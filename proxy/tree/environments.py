"""Environments that create requests of Docker and E2B clients name, and the specs that they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from proxy.refusals import RefusalError
from sandboxes.spec import EnvironmentSpec


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """The environment that a create request names. None or an empty value means that the client left it open."""

    image: str  # Name of an image or template, as the client knows it.
    env: Mapping[str, str] = field(default_factory=dict)  # Environment variables to add.
    workdir: str | None = None
    memory_mb: int | None = None
    pids: int | None = None  # Limit of processes.
    cpus: float | None = None
    # The environment that the settings give this image name; None if they give none.
    base: EnvironmentSpec | None = None
    # Side services to add, each as a spec has it.
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    volumes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # Shared volumes to add, as a spec has them.
    aliases: tuple[str, ...] = ()  # Names to add that lead to the sandbox.
    setup: tuple[str, ...] = ()  # Set-up commands to add.


def spec_for(
    request: EnvironmentRequest,
    task_spec: EnvironmentSpec | None,
    default: EnvironmentSpec,
    *,
    runs_images: bool,
    any_image: bool,
) -> EnvironmentSpec:
    """Return the spec of a rollout that begins with a request.

    The base is the first of these that exists: the spec with which the task was PUT, the environment of the settings
    for this image, the image (with the limits of the default spec). The request then adds its variables, working
    directory and limits. If `runs_images` is false, `any_image` says that an image means the default spec. Raises
    RefusalError: 404 if the image does not exist here; 400 if a variable or path is impossible.
    """
    base = task_spec or request.base
    # A file of the proxy's machine is for the person who describes the task to name, not for its clients.
    if base is None and runs_images and not request.image.startswith("/"):
        base = EnvironmentSpec(image=request.image, workdir="/", limits=default.limits)
    if base is None and any_image:
        base = default
    if base is None:
        detail = f"No such image: {request.image}. PUT the task with an environment, or turn the driver local on."
        raise RefusalError(404, "no-such-image", detail)
    limits = {"memory_mb": request.memory_mb, "pids": request.pids, "cpus": request.cpus}
    fields = base.model_dump()
    fields["env"] |= request.env
    fields["services"] |= request.services
    fields["volumes"] |= request.volumes
    fields["aliases"] = (*fields["aliases"], *request.aliases)
    fields["setup"] = (*fields["setup"], *request.setup)
    fields["workdir"] = request.workdir or fields["workdir"]
    fields["limits"] |= {name: value for name, value in limits.items() if value}
    try:
        return EnvironmentSpec.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise RefusalError(400, "environment", f"{where}: {fault['msg']}") from None
