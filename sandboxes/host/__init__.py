"""The proxy's end of a machine sandbox: it sends requests to the guest and translates the responses.

Process: the proxy.
May import: sandboxes, sandboxes.guest.bash, sandboxes.guest.files, sandboxes.ipc, sandboxes.linux, sandboxes.sql,
sandboxes.tool_clients.
"""
