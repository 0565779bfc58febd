"""The sandbox's side of checkpoints: starting CRIU, and looking at what it is about to save before it does.

Process: forks of pid 1 and of the launcher, in the namespaces of a sandbox. Standard library and msgspec only.
May import: sandboxes.guest, sandboxes.guest.anchors, sandboxes.ipc, sandboxes.linux.
"""
