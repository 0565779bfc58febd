"""APIs of other products, served to their unmodified clients.

Process: the proxy.
May import: proxy, proxy.audit, proxy.dialects, proxy.execution, proxy.http, proxy.storage, proxy.tree, sandboxes.
"""
