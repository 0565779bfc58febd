"""ASGI and HTTP helpers that every endpoint shares: addresses, access, streaming, error responses, uploads.

Process: the proxy.
May import: proxy, proxy.dialects, proxy.execution, proxy.storage, proxy.telemetry, proxy.tree, sandboxes,
sandboxes.pool.
"""
