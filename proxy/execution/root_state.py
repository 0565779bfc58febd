"""Root states: which driver a spec names, and which tree it means now."""

from collections.abc import Mapping

from proxy.dialects.rule_schema import RulesError, identity
from proxy.tree.keys import canonical_json, root_key
from sandboxes.driver import Driver
from sandboxes.errors import SpecError
from sandboxes.spec import EnvironmentSpec


def driver_of(drivers: Mapping[str, Driver], spec: EnvironmentSpec) -> Driver:
    """Return the driver of a spec's sandboxes.

    Raises:
        SpecError: there is none of this name.
    """
    driver = drivers.get(spec.driver)
    if driver is None:
        raise SpecError(f"there is no driver {spec.driver!r} here; there are: {', '.join(sorted(drivers))}.")
    return driver


async def tree_key(drivers: Mapping[str, Driver], spec: EnvironmentSpec) -> str:
    """Return the key of the tree that spec names now.

    Raises:
        SpecError: there is no such driver, or what spec names cannot be used.
    """
    driver = driver_of(drivers, spec)
    try:
        rules = identity(spec)
    except RulesError as error:
        raise SpecError(str(error)) from error
    return root_key(canonical_json(spec.root()), await driver.identity(spec) + rules)
