"""Several members with one tree for each task: who owns a task, its log, and where its rollouts are.

Process: the proxy, when it is one member of a cluster.
May import: proxy, proxy.cluster.hits, proxy.cluster.link, proxy.cluster.postgres, proxy.cluster.states, proxy.compat,
proxy.dataplane, proxy.execution, proxy.http, proxy.storage, proxy.telemetry, proxy.tree, sandboxes, sandboxes.ipc,
sandboxes.linux.
"""
