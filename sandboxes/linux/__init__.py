"""One module for each kernel interface: system calls, cgroups, Landlock, mounts, processes, terminals.

Process: all of ours.
May import: sandboxes.
"""
