"""A session as texts for bash: the dump that bash prints, and the script from which it comes back. Pure.

Process: pid 1 of a local sandbox.
May import: sandboxes.
"""
