"""Snapshots: which sandbox states are kept, where they are stored, and what they cost.

Process: the proxy.
May import: sandboxes, sandboxes.linux, sandboxes.pool.
"""
