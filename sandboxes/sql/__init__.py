"""Values, results, rendering and comparison, for the SQL drivers and the guest.

Process: the proxy, the workers and pid 1.
May import: sandboxes.
"""
