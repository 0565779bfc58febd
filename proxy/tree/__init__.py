"""The tree: call keys, nodes, records, rollouts, restore plans and predicted departures. Pure.

Process: the proxy.
"""
