"""The agents' side of the proxy: the hit path, the dispatch of misses, and WebSocket messages.

Process: the proxy.
May import: proxy, proxy.compat, proxy.dialects, proxy.execution, proxy.http, proxy.storage, proxy.telemetry,
proxy.tree, sandboxes.
"""
