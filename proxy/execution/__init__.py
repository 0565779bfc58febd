"""From a tree node to a running sandbox: restore, replay, single flight, warm forks, task lifetimes.

Process: the proxy.
"""
