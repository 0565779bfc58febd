"""The sandbox's files, as the supervisor sees them: operations on them, and what they differ in from the root state.

Process: pid 1 of a local sandbox and its children. Standard library and msgspec only.
May import: sandboxes, sandboxes.guest, sandboxes.guest.bash, sandboxes.ipc, sandboxes.linux, sandboxes.sql.
"""
