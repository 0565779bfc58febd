"""Several worker processes behind one port: each has a share of the tasks, and a connection goes to who has its task.

Process: the proxy's workers; `supervisor` runs in their parent.
May import: proxy, proxy.audit, proxy.http, proxy.storage, sandboxes, sandboxes.ipc, sandboxes.linux.
"""
