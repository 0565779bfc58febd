"""A driver of a Ray cluster on this machine, in a process of its own: it does what each line of stdin says.

Ray starts threads and takes over signals of the process that loads it. A line is JSON: the name of a method of `Driver`
and its arguments. The answer is JSON too: whether it succeeded, and the result or the text of the error.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import ray
from ray._private import services
from ray.cluster_utils import Cluster

import forkpoint.ray

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
"""What each node is given; 80 MB is the smallest object store."""


WITHIN_S = 120.0
"""A node of Ray may take this long to start. Ray's own 30 s are fixed, and a machine may be busy with other tests."""
_get_node = services.get_node


def _get_node_later(*arguments: Any, **more: Any) -> Any:
    """Return what Ray knows of a node, as soon as it knows it."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            return _get_node(*arguments, **more)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Driver:
    """A Ray cluster of one node and more, as processes of this machine."""

    def __init__(self) -> None:
        self._cluster = Cluster(
            initialize_head=True, head_node_args=NODE | {"include_dashboard": False, "include_log_monitor": False}
        )
        self._others: list[Any] = []
        ray.init(address=self._cluster.address, log_to_driver=False)

    def up(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the proxies of all nodes."""
        return list(map(asdict, forkpoint.ray.up(**settings)))

    def nodes(self) -> list[dict[str, Any]]:
        """Return the proxies of all nodes."""
        return list(map(asdict, forkpoint.ray.nodes()))

    def down(self) -> None:
        """End all proxies."""
        forkpoint.ray.down()

    def add(self) -> str:
        """Add a node, and return its ID."""
        node = self._cluster.add_node(**NODE)
        self._others.append(node)
        return str(node.node_id)

    def remove(self) -> None:
        """Remove the node that was added last, as if its machine failed."""
        self._cluster.remove_node(self._others.pop(), allow_graceful=False)

    def remove_all(self) -> None:
        """Leave the first node alone."""
        while self._others:
            self.remove()

    def url_here(self) -> str:
        """Return the base URL as a driver sees it."""
        return forkpoint.ray.base_url()

    def url_on(self, node: str) -> str:
        """Return the base URL as a worker on a node sees it."""
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        url = ray.remote(num_cpus=0, max_retries=0)(forkpoint.ray.base_url)
        return str(ray.get(url.options(scheduling_strategy=here).remote()))

    def actors(self) -> list[str]:
        """Return the names of all named actors."""
        return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]

    def close(self) -> None:
        """End the cluster."""
        ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    """Serve until the end of stdin."""
    services.get_node = _get_node_later
    # What Ray prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver()
    try:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer = [True, getattr(driver, name)(*arguments)]
            except (forkpoint.ray.RayError, ray.exceptions.RayError) as error:
                answer = [False, str(error)]
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        driver.close()


if __name__ == "__main__":
    main()
