"""The web page at `/ui`: static files, and the JSON routes that only the page needs.

Process: the proxy.
May import: proxy, proxy.control, proxy.control.routes, proxy.control.views, proxy.storage, proxy.tree, sandboxes.
"""
