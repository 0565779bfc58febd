"""The `client` driver: the sandboxes are the client's own, and it reports what ran in them.

Process: the proxy.
May import: sandboxes.
"""
