"""Export and import: a task's trees, and optionally their sandbox states, as one file.

Process: the proxy.
May import: proxy, proxy.dialects, proxy.execution, proxy.storage, proxy.tree, snapshots, sandboxes, sandboxes.linux.
"""
