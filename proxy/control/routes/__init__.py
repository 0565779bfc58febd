"""The REST routes, one module for each resource.

Process: the proxy.
May import: proxy, proxy.audit, proxy.control, proxy.control.views, proxy.dialects, proxy.http, proxy.storage,
proxy.telemetry, proxy.transfer, proxy.tree, snapshots, sandboxes, sandboxes.pool, sandboxes.video.
"""
