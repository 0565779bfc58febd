"""The shapes of REST responses, as pydantic models. Pure.

Process: the proxy.
May import: proxy.control, proxy.execution, proxy.tree, snapshots, sandboxes, sandboxes.pool.
"""
