"""Egress: the one way out of a sandbox, to hosts that its spec names and the administrator has listed.

Process: `gateway` in the proxy; the egress proxy is a process of its own, one for each driver.
May import: sandboxes, sandboxes.ipc, sandboxes.linux, sandboxes.tool_clients, sandboxes.workers.
"""
