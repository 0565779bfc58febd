"""Pre-forked worker processes that execute SQL statements and decode videos.

Process: the proxy, the zygote and its workers.
May import: sandboxes, sandboxes.ipc, sandboxes.linux.
"""
