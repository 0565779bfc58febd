"""The agents' side of the proxy: the hit path, the dispatch of misses, and WebSocket messages.

Process: the proxy.
"""
