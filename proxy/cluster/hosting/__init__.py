"""Sandboxes on other members: the tree stays at its owner, and its sandboxes run where there is room.

Process: the proxy, when it is one member of a cluster.
May import: proxy, proxy.cluster, proxy.cluster.link, proxy.cluster.postgres, proxy.telemetry, sandboxes,
sandboxes.ipc, sandboxes.pool.
"""
