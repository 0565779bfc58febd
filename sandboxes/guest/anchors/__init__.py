"""What starts the processes of a `local` sandbox: the anchor, by program, and the templates of its shells.

Process: pid 1 of a local sandbox. A container's keeper uses its errors.
May import: sandboxes, sandboxes.guest, sandboxes.guest.bash, sandboxes.linux.
"""
