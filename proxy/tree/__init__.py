"""The tree: call keys, nodes, records, rollouts, restore plans and predicted departures. Pure.

Process: the proxy.
May import: proxy, snapshots, sandboxes.
"""
