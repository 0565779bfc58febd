"""The Docker Engine API, so that any Docker client can use a rollout's sandbox as its container.

Process: the proxy.
May import: proxy, proxy.compat, proxy.dialects, proxy.execution, proxy.http, proxy.storage, proxy.tree, sandboxes,
sandboxes.guest.files, sandboxes.images, sandboxes.local, sandboxes.tool_clients.
"""
