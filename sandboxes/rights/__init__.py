"""Rights: what a proxy that is not root may do itself, and what a launcher that is root does for it.

Process: the proxy, the launcher and its service.
May import: sandboxes.ipc, sandboxes.linux.
"""
