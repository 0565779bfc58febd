"""Several members with one tree for each task: who owns a task, and its log.

Process: the proxy, when it is one member of a cluster.
May import: proxy, proxy.cluster.link, proxy.cluster.postgres, proxy.cluster.states, proxy.compat, proxy.dataplane,
proxy.execution, proxy.http, proxy.storage, proxy.telemetry, proxy.tree, sandboxes, sandboxes.ipc, sandboxes.linux,
sandboxes.tool_clients.
"""
