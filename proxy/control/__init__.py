"""The REST API for people and trainers: it shows trees, rollouts and costs, and operates on them.

Process: the proxy.
May import: proxy, proxy.audit, proxy.control.routes, proxy.control.views, proxy.dialects, proxy.execution,
proxy.http, proxy.storage, proxy.telemetry, proxy.transfer, proxy.tree, snapshots, sandboxes, sandboxes.pool,
sandboxes.video.
"""
