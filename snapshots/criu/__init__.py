"""Checkpoints of live processes. This room is the only one that talks to CRIU and uses protobuf.

Process: the proxy; `criu` runs as a child.
May import: sandboxes, sandboxes.ipc, sandboxes.linux.
"""
