"""The proxy between agents and their tools: it records calls in trees and answers the ones it knows.

Process: the proxy.
May import: proxy.audit, proxy.cluster, proxy.cluster.postgres, proxy.control, proxy.control.routes, proxy.dataplane,
proxy.execution, proxy.http, proxy.storage, proxy.telemetry, proxy.transfer, proxy.tree, proxy.ui, proxy.workers,
snapshots, snapshots.criu, sandboxes, sandboxes.linux, sandboxes.pool.
"""
