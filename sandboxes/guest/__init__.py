"""What runs inside a sandbox or beside it: supervisor, shells, background processes, change detection.

Standard library and msgspec only, no event loop.

Process: pid 1 of a `local` sandbox.
May import: sandboxes, sandboxes.guest.anchors, sandboxes.guest.bash, sandboxes.guest.files, sandboxes.ipc,
sandboxes.linux.
"""
