"""Which drivers `serve` starts: those that this machine can run. What was asked for is never left out silently."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from proxy.cli.doctor import Requirement
from proxy.settings import Settings


class Start(NamedTuple):
    """How `serve` starts."""

    settings: Settings
    left_out: tuple[str, ...]  # A sentence for each driver that cannot run here and that nothing asked for.
    refusal: str  # Why it does not start; empty if it does.


def plan(settings: Settings, requirements: Sequence[Requirement]) -> Start:
    """Return how to start where these requirements were checked."""
    unmet: Mapping[str, Requirement] = {
        requirement.driver: requirement for requirement in reversed(requirements)
        if requirement.required and not requirement.ok
    }  # fmt: skip
    if "" in unmet:
        return Start(settings, (), _sentences("The proxy cannot start", unmet[""]))
    needed = _needed(settings)
    for name in settings.driver_names:
        if name in unmet and name in needed:
            return Start(settings, (), _missing(unmet[name], needed[name]))
    able = tuple(name for name in settings.driver_names if name not in unmet)
    left_out = tuple(_missing(unmet[name], "It is left out.") for name in settings.driver_names if name in unmet)
    return Start(settings.model_copy(update={"drivers": able}) if left_out else settings, left_out, "")


def _missing(unmet: Requirement, consequence: str) -> str:
    return _sentences(f"The driver {unmet.driver} cannot run here", unmet, consequence)


def _sentences(what: str, unmet: Requirement, *more: str) -> str:
    return " ".join(filter(None, (f"{what}: {unmet.name}: {unmet.detail}.", unmet.remedy, *more)))


def _needed(settings: Settings) -> dict[str, str]:
    """Return the drivers without which the proxy must not start, each with what to do without it."""
    names = settings.driver_names
    if "drivers" in settings.model_fields_set:
        return dict.fromkeys(names, "It can be taken out of the setting drivers.")
    if settings.cluster is not None:
        return dict.fromkeys(names, "It is not left out, because any member of a cluster may get its tasks.")
    needed = {
        name: "It is not left out, because the data directory has states of it."
        # Each worker has a directory of its own (`proxy.workers.division`).
        for name in names if any(True for folder in (".", "worker-*") for _ in settings.data.glob(f"{folder}/{name}"))
    }  # fmt: skip
    if "default_spec" in settings.model_fields_set and settings.default_spec.driver in names:
        needed[settings.default_spec.driver] = "It is not left out, because default_spec names it."
    return needed
