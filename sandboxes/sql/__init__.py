"""What the SQL drivers and the guest share: values, results, rendering and comparison.

Process: the proxy, the workers and pid 1.
"""
