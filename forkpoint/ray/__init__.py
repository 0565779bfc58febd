"""Proxies on the nodes of a Ray cluster. Ray starts them and watches them; no call and no answer goes through Ray.

    import forkpoint.ray
    forkpoint.ray.up()                  # in any driver, after ray.init(); again and again if you like
    url = forkpoint.ray.base_url()      # in any worker: the proxy of its own node

Each living node has a detached actor (`proxy_actor`) that holds the listening socket and runs `forkpoint serve` as its
child. One more detached actor (`controller`) makes such an actor on each node that joins. `down` ends all of them.
This package is the one that imports Ray, which is the extra `forkpoint[ray]`. docs/ray.md has the rest.
"""

try:
    import ray as _ray
except ImportError as error:
    raise ImportError("forkpoint.ray needs Ray. Install it: pip install 'forkpoint[ray]'") from error

from forkpoint.ray.cluster import NodeProxy, RayError, base_url, connected, down, nodes, up

del _ray

__all__ = ["NodeProxy", "RayError", "base_url", "connected", "down", "nodes", "up"]
