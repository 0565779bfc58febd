"""The actor that sees to it that each living node of the Ray cluster has a proxy actor."""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forkpoint.ray.proxy_actor import ProxyActor, ProxyPlan, load_little

NAMESPACE = "forkpoint"
"""Ray's namespace of our actors, so that drivers with any namespace find them."""
CONTROLLER = "controller"
EVERY_S = 1.0
"""How often the nodes are looked at. A node that joins has its proxy about this much later."""
AGAIN_S = 30.0
"""Wait before another actor is made on a node where one could not be made, for example without Forkpoint's package."""
_PREFIX = "proxy-"
log = logging.getLogger(__name__)


class Controller:
    """Makes a proxy actor on each living node that has none, until `stop`; Ray may make the controller again."""

    def __init__(self, plan: ProxyPlan) -> None:
        self._plan = plan
        self._tried: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forkpoint-nodes", daemon=True)
        self._thread.start()

    def plan(self) -> ProxyPlan:
        """Return what runs on each node."""
        return self._plan

    def stop(self) -> None:
        """Make no more actors. None is being made when this returns."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except Exception:  # Ray's own, while its head restarts: the next look will tell.
                log.exception("the nodes of the Ray cluster could not be looked at")
            self._stopped.wait(EVERY_S)

    def _look(self) -> None:
        """Compare the living nodes with the proxy actors. O(nodes), with two requests to Ray's head."""
        alive, served = living(), dict(named())
        for node in served.keys() - alive.keys():
            # Its node is gone for good: Ray gives each node that joins another name.
            end(served.pop(node))
        missing = [node for node in alive if node not in served]
        if not self._plan.clustered:
            missing = [] if served else missing[:1]
        now = time.monotonic()
        for node in missing:
            if now - self._tried.get(node, -AGAIN_S) >= AGAIN_S:
                self._tried[node] = now
                self._make(node)

    def _make(self, node: str) -> None:
        here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = ray.remote(num_cpus=0, max_restarts=-1)(_with_plan(self._plan))
        actor.options(**detached(name_of(node)), scheduling_strategy=here).remote()


def _with_plan(plan: ProxyPlan) -> type[ProxyActor]:
    """Return the class of actors with a plan: Ray loads libraries before it reads an argument; see `load_little`."""

    class PlannedActor(ProxyActor):
        def __init__(self) -> None:
            load_little()
            super().__init__(plan)

    return PlannedActor


def detached(name: str) -> dict[str, Any]:
    """Return the options of an actor that outlives its driver, and exists once under its name."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}


def name_of(node: str) -> str:
    """Return the name of a node's proxy actor."""
    return f"{_PREFIX}{node}"


def living() -> dict[str, str]:
    """Return the addresses of the living nodes, by their IDs."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def named() -> Iterator[tuple[str, str]]:
    """Yield the ID of the node and the name of each proxy actor."""
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(_PREFIX):
            yield actor["name"].removeprefix(_PREFIX), actor["name"]


def find(name: str) -> Any:
    """Return the handle of one of our actors; None if there is none of this name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def end(name: str) -> None:
    """End an actor for good, if there is one of this name."""
    actor = find(name)
    if actor is not None:
        ray.kill(actor, no_restart=True)
