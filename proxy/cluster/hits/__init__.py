"""Hits through another member than the owner of the task: calls that are sent and answered without a task.

Process: the proxy, when it is one member of a cluster.
May import: proxy, proxy.cluster, proxy.cluster.link, proxy.dataplane, proxy.http, sandboxes, sandboxes.ipc.
"""
