"""Speculation: calls that rollouts are likely to make next are executed while their agents think.

Process: the proxy.
May import: proxy.execution, proxy.http, proxy.storage, proxy.telemetry, proxy.tree, snapshots, sandboxes,
sandboxes.pool.
"""
