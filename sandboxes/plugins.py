"""Plug-ins: drivers and dialects are found through entry points, ours and those of other packages alike.

A distribution names its factories in its metadata, for example in `pyproject.toml`:

    [project.entry-points."forkpoint.drivers"]
    mykind = "my_package:driver"

`docs/extending.md` builds both kinds.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from sandboxes.checkpointing import Checkpointer, NoCheckpointer
from sandboxes.driver import Driver
from sandboxes.sources import SourceRules

DRIVERS = "forkpoint.drivers"
"""The group of driver factories: each is called with a `DriverContext` and returns a `Driver`."""
DIALECTS = "forkpoint.dialects"
"""The group of dialect factories: each is called with an `EnvironmentSpec` and returns a dialect or None."""

ENDPOINTS = "forkpoint.endpoints"
"""The group of endpoint factories, for whole APIs with services of their own; see `proxy.compat.endpoints`."""


class PluginError(RuntimeError):
    """A plug-in is missing, ambiguous or broken. The text says which, and what to install."""


@dataclass(frozen=True, slots=True)
class DriverContext:
    """What a driver's factory is given."""

    directory: Path  # The driver's own data directory. It may not exist yet, and nothing else writes to it.
    # Makes the checkpointer for drivers that freeze live processes. The proxy gives CRIU's.
    checkpointer: Callable[[], Checkpointer] = NoCheckpointer
    spares: int = 0  # How many sandboxes the operator wants prepared ahead; 0 for drivers without such a setting.
    # What specs may name on this machine and elsewhere. A driver that opens a path of a spec checks it again when it
    # does (`SourceRules.real`).
    sources: SourceRules = field(default_factory=SourceRules)


DriverFactory = Callable[[DriverContext], Driver]
"""Makes a driver. It must not start anything: `Driver.open` does."""


@functools.cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """Return the plug-ins of a group by name, in alphabetical order, loading none."""
    # A name of two distributions is an error: a driver that replaces another one silently would run agents' commands in
    # the wrong kind of sandbox.
    by_name: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        known = by_name.setdefault(entry.name, entry)
        if known.value != entry.value:
            owners = sorted({other.dist.name for other in (known, entry) if other.dist is not None})
            raise PluginError(f"{group}: {entry.name!r} is defined twice, by {' and '.join(owners)}. Uninstall one.")
    return by_name


@functools.cache
def load(group: str, name: str) -> Any:
    """Return the factory of a plug-in, importing its module; `PluginError` if that is impossible."""
    plugins = installed(group)
    if name not in plugins:
        raise PluginError(f"{group}: {name!r} is not installed; installed are: {', '.join(plugins)}.")
    try:
        return plugins[name].load()
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{group}: {name!r} cannot be loaded ({error}).") from error


def make_driver(name: str, context: DriverContext) -> Driver:
    """Return a new driver, not opened yet; `PluginError` if it, or a package that it needs, is missing."""
    factory: DriverFactory = load(DRIVERS, name)
    try:
        return factory(context)
    except ImportError as error:
        raise PluginError(f"driver {name!r} needs a package that is not installed ({error}).") from error
