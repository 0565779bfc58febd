"""What starts the processes of a `local` sandbox: the anchor, by program, and the templates of its shells.

Process: pid 1 of a local sandbox.
May import: sandboxes, sandboxes.guest, sandboxes.guest.bash, sandboxes.linux.
"""
