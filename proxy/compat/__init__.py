"""APIs of other products, served to their unmodified clients.

Process: the proxy.
May import: proxy, proxy.dialects, proxy.http, proxy.tree, sandboxes.
"""
