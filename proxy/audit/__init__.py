"""Audits: recorded calls are executed again, and their answers are compared with the records.

Process: the proxy.
May import: proxy, proxy.dialects, proxy.execution, proxy.storage, proxy.telemetry, proxy.tree, snapshots, sandboxes,
sandboxes.pool.
"""
