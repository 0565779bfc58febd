"""Messages between our processes: frames and file descriptors over a Unix socket.

Process: all of ours.
May import: sandboxes.
"""
