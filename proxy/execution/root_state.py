"""Root states: which driver builds a spec, and which tree the spec means now."""

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from time import monotonic

import structlog

from proxy.dialects.rule_schema import RulesError, identity
from proxy.telemetry.counters import Counters
from proxy.tree.keys import canonical_json, root_key
from proxy.tree.tree import Tree
from sandboxes.driver import Driver, WatchingDriver, fulfils
from sandboxes.errors import SandboxError, SpecError
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

_LOOKED_S = 1.0
"""How long a look at a spec's sources counts, for drivers that do not watch them. An image's name that is moved to
another image is noticed by the rollouts that begin a second later."""
_PATIENCE_S = 1.0
"""How long a rollout that begins waits for such a look. A database server that is down, or that copies a new database,
holds no other rollout up for longer; a miss waits for the look all the same."""


class RootChangedError(SpecError):
    """What a tree's spec names has changed since the tree began, so its root state cannot be started any more."""

    def __init__(self) -> None:
        super().__init__(
            "the base or an archive that this rollout's task names has changed since its tree began, and no sandbox or "
            "snapshot of this state is left. Start another rollout: it begins with the base as it is now."
        )


def driver_of(drivers: Mapping[str, Driver], spec: EnvironmentSpec) -> Driver:
    """Return the driver of a spec's sandboxes. Raises SpecError if no driver of this name is turned on."""
    driver = drivers.get(spec.driver)
    if driver is None:
        raise SpecError(
            f"the driver {spec.driver!r} is not turned on here. Choose one of: {', '.join(sorted(drivers))}."
        )
    return driver


async def tree_key(drivers: Mapping[str, Driver], spec: EnvironmentSpec, sources: SourceRules) -> str:
    """Return the key of the tree that a spec means now; the content that the spec refers to may have changed.

    Raises SpecError if the driver or something that the spec refers to cannot be used, or ForbiddenSourceError.
    """
    driver = driver_of(drivers, spec)
    # In a thread: a path may be on a slow network disk.
    await asyncio.to_thread(sources.check, spec)
    try:
        # The rules of the spec decide what requests mean, so trees recorded under other rules are other trees.
        rules = identity(spec)
    except RulesError as error:
        raise SpecError(str(error)) from error
    # The driver may have to read files or query a container engine: it awaits, so callers look again afterwards.
    return root_key(canonical_json(spec.root()), await driver.identity(spec) + rules)


@dataclass(frozen=True, slots=True)
class _Look:
    unchanged: Hashable | None  # What a watching driver returned then; None of another driver.
    at: float  # When, on the monotonic clock.
    key: str  # The key of the tree that the spec meant then.


class RootChanges:
    """Knows which trees are *current*: their root state is what their spec means now.

    New rollouts begin in current trees only. A rollout in another tree goes on there, without sharing its calls.
    """

    def __init__(self, drivers: Mapping[str, Driver], sources: SourceRules, counts: Counters) -> None:
        self._drivers, self._sources, self._counts = drivers, sources, counts
        self._looks: dict[int, _Look] = {}
        self._looking: dict[int, asyncio.Task[str]] = {}
        self.background = TaskOwner()  # The looks at sources that are under way.

    async def key(self, spec: EnvironmentSpec) -> str:
        """Return the key of the tree that a spec means now; see `tree_key`."""
        return await tree_key(self._drivers, spec, self._sources)

    async def is_current(self, tree: Tree, *, patience_s: float | None = None) -> bool:
        """Return whether a tree's root state is what its spec means now. Raises SpecError or SandboxError.

        `patience_s` limits the look at sources that the driver does not watch (None: no limit); until it ends, the
        result of the one before counts. 0 begins none.
        """
        driver, look = driver_of(self._drivers, tree.spec), self._looks.get(tree.id)
        if fulfils(driver, WatchingDriver):
            now = driver.unchanged(tree.spec)
            if look is not None and now is not None and look.unchanged == now:
                return look.key == tree.key
        elif patience_s is not None:
            recent = look is not None and monotonic() < look.at + _LOOKED_S
            if recent or not patience_s or not await self._looked_within(tree, patience_s):
                look = self._looks.get(tree.id)
                return look is None or look.key == tree.key
            return self._looks[tree.id].key == tree.key
        return await self._look(tree, driver) == tree.key

    async def _looked_within(self, tree: Tree, patience_s: float) -> bool:
        """Wait for a look at a tree's sources, under way or new; return whether it ended in time."""
        looking = self._looking.get(tree.id)
        if looking is None:
            look = self._look(tree, driver_of(self._drivers, tree.spec))
            looking = self._looking[tree.id] = self.background.spawn("look at sources", look, awaited=True)
            looking.add_done_callback(lambda _: self._looking.pop(tree.id, None))
        ended, _ = await asyncio.wait([looking], timeout=patience_s)
        if ended:
            looking.result()
        return bool(ended)

    async def _look(self, tree: Tree, driver: Driver) -> str:
        """Compute the key of the tree that a spec means now, and note it."""
        before = driver.unchanged(tree.spec) if fulfils(driver, WatchingDriver) else None
        key = await self.key(tree.spec)
        after = driver.unchanged(tree.spec) if fulfils(driver, WatchingDriver) else None
        look = self._looks.get(tree.id)
        if (look is None or look.key == tree.key) and key != tree.key:
            self._counts.root_changes += 1
            log.warning(
                "the base or an archive has changed: new rollouts begin a new tree", tree=tree.id, base=tree.spec.base
            )
        # Another change may have come while the key was made; then only the next look is sure.
        self._looks[tree.id] = _Look(after if before in (None, after) else None, monotonic(), key)
        return key

    async def is_usable(self, tree: Tree, *, looks: bool = True) -> bool:
        """Return whether a tree may be shared: it is current, or that is unknown; `looks` may take `_PATIENCE_S`."""
        try:
            return await self.is_current(tree, patience_s=_PATIENCE_S if looks else 0.0)
        except (SpecError, SandboxError):
            # The base is gone, or Docker is down. What is recorded can still be answered; a miss says what is wrong.
            return True
