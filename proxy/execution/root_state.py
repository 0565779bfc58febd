"""Root states: which driver builds a spec, and which tree the spec means now."""

from collections.abc import Mapping

from proxy.dialects.rule_schema import RulesError, identity
from proxy.tree.keys import canonical_json, root_key
from sandboxes.driver import Driver
from sandboxes.errors import SpecError
from sandboxes.spec import EnvironmentSpec


def driver_of(drivers: Mapping[str, Driver], spec: EnvironmentSpec) -> Driver:
    """Return the driver of a spec's sandboxes.

    Raises:
        SpecError: No driver of this name is turned on.
    """
    driver = drivers.get(spec.driver)
    if driver is None:
        raise SpecError(
            f"the driver {spec.driver!r} is not turned on here. Choose one of: {', '.join(sorted(drivers))}."
        )
    return driver


async def tree_key(drivers: Mapping[str, Driver], spec: EnvironmentSpec) -> str:
    """Return the key of the tree that a spec means now.

    The spec alone does not name a tree: the content of a base, an archive or a database that it refers to may change.

    Raises:
        SpecError: The driver is not turned on, or something that the spec refers to cannot be used.
    """
    driver = driver_of(drivers, spec)
    try:
        # The rules of the spec decide what requests mean, so trees recorded under other rules are other trees.
        rules = identity(spec)
    except RulesError as error:
        raise SpecError(str(error)) from error
    # The driver may have to read files or query a container engine: it awaits, so callers look again afterwards.
    return root_key(canonical_json(spec.root()), await driver.identity(spec) + rules)
