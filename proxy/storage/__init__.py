"""Everything that outlives a restart: the SQLite database and the journal of steps.

Process: the proxy.
May import: proxy, proxy.tree, sandboxes, sandboxes.linux.
"""
