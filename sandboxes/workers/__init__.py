"""Pre-forked workers for SQL and video, and the parts that they read.

Process: the proxy, the zygote and its workers.
May import: sandboxes, sandboxes.ipc, sandboxes.linux.
"""
