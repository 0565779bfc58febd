"""Kept states in a store that all members share, so that the next owner of a task restores instead of replaying.

Process: the proxy, when it is one member of a cluster.
May import: proxy, proxy.cluster, proxy.cluster.postgres, proxy.transfer, proxy.tree, snapshots, sandboxes.
"""
