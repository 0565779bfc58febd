"""What drivers and workers call: `up`, `down`, `nodes` and `base_url`."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError
from ray.exceptions import RayError as FrameworkError

from forkpoint.ray.controller import CONTROLLER, Controller, detached, end, find, living, name_of, named
from forkpoint.ray.proxy_actor import STOP_S, ProxyPlan, ProxyState

if TYPE_CHECKING:
    from proxy.settings import Settings

FAILURES = 3
"""A proxy that failed this often in a row will not start: `up` says why and gives up."""
ANSWER_S = 30.0
"""Timeout of a question to one of our actors, which answers within milliseconds on a machine with free cores."""
_POLL_S = 0.1


class RayError(RuntimeError):
    """The proxies of a Ray cluster cannot be started or found. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class NodeProxy(ProxyState):
    """The proxy of one node, by Ray's ID of the node and its address, and what `ProxyState` says of it."""

    node: str
    address: str


@contextmanager
def connected(address: str = "auto") -> Iterator[None]:
    """Be a driver of the Ray cluster of RAY_ADDRESS or this machine ("auto") in the block. Raises RayError."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayError(f"no Ray cluster can be reached: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def up(*, within_s: float = 120.0, **settings: object) -> list[NodeProxy]:
    """Run a proxy on each node of the Ray cluster, now and on nodes that join. Idempotent, from any driver.

    Args:
        within_s: Seconds in which the proxies of all nodes must answer. A start takes about 2 s.
        settings: Settings by their names, as `forkpoint serve` takes them, such as `cluster="postgresql://…"`. Others
            come from this process's FORKPOINT_… variables. Without any of both, proxies that run are left as they are.
            `data` is a directory of each machine, in which each node has its own; `node` is always the host's name.

    Returns:
        The proxies of all nodes.

    Raises:
        RayError: Ray is not initialised, a setting is wrong or missing, the proxies run with other settings, or a
            proxy does not start. Then what this call started is ended again.
    """
    _require_ray()
    wanted = _plan(settings)
    controller = find(CONTROLLER)
    if controller is not None:
        running: ProxyPlan = _answer(controller.plan, within_s)
        if wanted.settings and running != wanted:
            raise RayError(
                "Forkpoint runs on this Ray cluster with other settings. Call forkpoint.ray.down() first, or up() "
                "without settings."
            )
        _require_cluster(running)
        return _all_ready(within_s)
    _require_cluster(wanted)
    ray.remote(num_cpus=0, max_restarts=-1)(Controller).options(**detached(CONTROLLER)).remote(wanted)
    try:
        return _all_ready(within_s)
    except RayError:
        down()
        raise


def down() -> None:
    """End all proxies and actors of ours; calls in flight are answered first. Idempotent. Raises RayError."""
    _require_ray()
    controller = find(CONTROLLER)
    if controller is not None:
        # From here on no actor is made.
        with suppress(FrameworkError):
            ray.get(controller.stop.remote(), timeout=ANSWER_S)
        end(CONTROLLER)
    proxies = [name for _, name in named()]
    stopping = [actor.stop.remote() for actor in map(find, proxies) if actor is not None]
    for stopped in stopping:
        # Where the actor or its node is gone, so is its proxy.
        with suppress(FrameworkError):
            ray.get(stopped, timeout=STOP_S + ANSWER_S)
    for name in proxies:
        end(name)
    deadline = time.monotonic() + ANSWER_S
    while list(named()) or find(CONTROLLER) is not None:
        if time.monotonic() > deadline:
            raise RayError("the actors of Forkpoint do not end. See them with: ray list actors")
        time.sleep(_POLL_S)


def nodes() -> list[NodeProxy]:
    """Return the proxies of all nodes that have one, asking each. Raises RayError if Ray is not initialised."""
    _require_ray()
    return _proxies(living())


def base_url(within_s: float = 60.0) -> str:
    """Return the base URL of the proxy on this node, which gets `within_s` if it has just joined. Raises RayError."""
    _require_ray()
    node = ray.get_runtime_context().get_node_id()
    deadline = time.monotonic() + within_s
    while True:
        actor = find(name_of(node))
        if actor is not None:
            url: str | None = _answer(actor.url, within_s)
            if url is not None:
                return url
        else:
            controller = find(CONTROLLER)
            if controller is None:
                raise RayError("no proxy runs on this Ray cluster. Call forkpoint.ray.up() in the driver.")
            _require_cluster(_answer(controller.plan, within_s))
        if time.monotonic() > deadline:
            raise RayError(
                f"this node has no proxy after {within_s:.0f} s. forkpoint.ray.nodes() says what runs where."
            )
        time.sleep(_POLL_S)


def _require_ray() -> None:
    if not ray.is_initialized():
        raise RayError("Ray is not initialised. Call ray.init() first.")


def _require_cluster(plan: ProxyPlan) -> None:
    """Refuse several nodes with a plan for one: each would have trees of its own."""
    count = len(living())
    if count > 1 and not plan.clustered:
        raise RayError(
            f"this Ray cluster has {count} nodes, and proxies on several nodes need the settings cluster, "
            "cluster_secret and store (docs/cluster.md)."
        )


def _plan(settings: Mapping[str, object]) -> ProxyPlan:
    """Return the plan for settings, which are checked as `forkpoint serve` checks them."""
    # A worker that only asks for its URL does not load the proxy's settings.
    from forkpoint.ephemeral_proxy import as_variables  # noqa: PLC0415
    from proxy.settings import Settings  # noqa: PLC0415

    given = {name: value for name, value in settings.items() if value is not None}
    try:
        checked = Settings.load(None, **given)
    except ValueError as error:
        raise RayError(_sentence(error)) from error
    variables = _variables(Settings) | as_variables(given)
    data = str(checked.data.absolute()) if "FORKPOINT_DATA" in variables else None
    return ProxyPlan(checked.host, checked.port, data, variables, checked.cluster is not None)


def _variables(settings: "type[Settings]") -> dict[str, str]:
    """Return the variables of this process that are settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("FORKPOINT_")
        and name.removeprefix("FORKPOINT_").partition("__")[0].lower() in settings.model_fields
    }


def _sentence(error: ValueError) -> str:
    """Return what is wrong with the settings, without the values, which may be secrets."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return f"the settings are invalid: {error}"
    faults = ((".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")) for fault in errors())
    return "; ".join(f"the setting {name} is invalid: {text}" if name else text for name, text in faults)


def _all_ready(within_s: float) -> list[NodeProxy]:
    deadline = time.monotonic() + within_s
    while True:
        waiting = living()
        proxies = _proxies(waiting)
        for proxy in proxies:
            if proxy.failures >= FAILURES:
                raise RayError(f"the proxy on node {proxy.address} does not start: {proxy.problem}")
            if proxy.ready:
                waiting.pop(proxy.node, None)
        if not waiting:
            return proxies
        if time.monotonic() > deadline:
            shown = ", ".join(sorted(set(waiting.values())))
            reasons = "; ".join(sorted({proxy.problem for proxy in proxies if proxy.problem}))
            raise RayError(f"no proxy answers after {within_s:.0f} s on these nodes: {shown}. {reasons}".rstrip())
        time.sleep(_POLL_S)


def _proxies(addresses: Mapping[str, str]) -> list[NodeProxy]:
    """Ask the actors of all nodes, by ID and address, at once; a node, or its proxy, may be gone."""
    pending = [(node, actor.state.remote()) for node, name in named() if (actor := find(name)) is not None]
    return [NodeProxy(**asdict(_state(state)), node=node, address=addresses.get(node, "")) for node, state in pending]


def _state(pending: Any) -> ProxyState:
    """Return what an actor answers; one that cannot be made has a problem and nothing else."""
    try:
        state: ProxyState = ray.get(pending, timeout=ANSWER_S)
    except (ActorUnavailableError, GetTimeoutError):
        return ProxyState(None, None, False, 0, 0, "Ray starts its actor again", None)
    except FrameworkError as error:
        return ProxyState(None, None, False, 0, FAILURES, _last(error), None)
    return state


def _answer(method: Any, within_s: float) -> Any:
    """Call a method of an actor; while Ray starts the actor again, ask again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return ray.get(method.remote(), timeout=within_s)
        except FrameworkError as error:
            if not isinstance(error, ActorUnavailableError) or time.monotonic() > deadline:
                raise RayError(f"an actor of Forkpoint does not answer: {_last(error)}") from error
        time.sleep(_POLL_S)


def _last(error: Exception) -> str:
    """Return the last line of an error of Ray, after the traceback that it quotes."""
    return str(error).strip().splitlines()[-1]
