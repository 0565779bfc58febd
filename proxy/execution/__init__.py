"""From a tree node to a running sandbox: restore, replay, single flight, warm forks, task lifetimes.

Process: the proxy.
May import: proxy, proxy.dialects, proxy.storage, proxy.telemetry, proxy.tree, snapshots, sandboxes, sandboxes.pool.
"""
