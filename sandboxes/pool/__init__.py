"""The pool of live sandboxes: lifecycle, leases and the memory budget.

Process: the proxy.
May import: sandboxes, sandboxes.linux.
"""
