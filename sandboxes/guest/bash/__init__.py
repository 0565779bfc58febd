"""A session as texts for bash: the dump that bash prints, and the script from which it comes back. Pure.

Process: pid 1 of a local sandbox, or a container's keeper.
May import: sandboxes.
"""
