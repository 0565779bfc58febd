"""Which environment a rollout begins in whose create request names one, as Docker's and E2B's do (pure)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from proxy.refusals import RefusalError
from sandboxes.spec import EnvironmentSpec


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """What a create request asks for. image: a name that its client knows; what is None or empty is not asked for.

    base: the environment that image stands for, where the settings say so.
    """

    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    memory_mb: int | None = None
    pids: int | None = None
    base: EnvironmentSpec | None = None


def spec_for(
    wanted: EnvironmentRequest,
    given: EnvironmentSpec | None,
    default: EnvironmentSpec,
    drivers: Collection[str],
    *,
    any_image: bool,
) -> EnvironmentSpec:
    """Return the spec of a rollout that begins with wanted.

    given: as its task was PUT; it stays the base, and wanted only adds variables, a directory and limits. Without one
    it is wanted's own base, or the image is that of a container with default's limits, where that driver is on;
    any_image: elsewhere it is default, whatever its name.

    Raises:
        Refused: 404, there is no such image here; 400, a variable or a path that no environment can have.
    """
    base = given or wanted.base
    if base is None and "container" in drivers:
        base = EnvironmentSpec(driver="container", image=wanted.image, workdir="/", limits=default.limits)
    if base is None and any_image:
        base = default
    if base is None:
        detail = f"No such image: {wanted.image}. PUT the task with an environment, or turn the driver container on."
        raise RefusalError(404, "no-such-image", detail)
    limits = {"memory_mb": wanted.memory_mb, "pids": wanted.pids}
    told = base.model_dump()
    told["env"] |= wanted.env
    told["workdir"] = wanted.workdir or told["workdir"]
    told["limits"] |= {name: value for name, value in limits.items() if value}
    try:
        return EnvironmentSpec.model_validate(told)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise RefusalError(400, "environment", f"{where}: {fault['msg']}") from None
