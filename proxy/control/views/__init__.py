"""The shapes of REST responses, as pydantic models. Pure.

Process: the proxy.
May import: proxy, proxy.control, proxy.execution, proxy.tree, snapshots, sandboxes, sandboxes.pool.
"""
