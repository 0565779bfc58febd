"""The `http` driver: tool servers that run elsewhere and whose state Forkpoint can neither see nor keep.

Process: the proxy.
May import: sandboxes, sandboxes.tool_clients.
"""
