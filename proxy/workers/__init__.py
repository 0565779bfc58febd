"""Several worker processes behind one port: each has a share of the tasks, and its connections go there.

Process: the proxy's workers; `supervisor` runs in their parent.
May import: proxy, proxy.control, proxy.control.routes, proxy.dataplane, proxy.http, proxy.storage, proxy.transfer,
sandboxes, sandboxes.ipc, sandboxes.linux, sandboxes.tool_clients.
"""
