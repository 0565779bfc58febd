"""Everything that outlives a restart: the SQLite database and the journal of steps.

Process: the proxy.
May import: proxy.tree, sandboxes, sandboxes.linux.
"""
