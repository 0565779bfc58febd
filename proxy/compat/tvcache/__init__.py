"""The cache API of TVCACHE's authors, for their client library, whose sandboxes are its own.

Process: the proxy.
May import: proxy, proxy.compat, proxy.dialects, proxy.http, proxy.tree, sandboxes, sandboxes.client.
"""
