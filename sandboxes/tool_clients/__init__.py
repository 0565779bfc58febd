"""Clients of tool servers, inside a sandbox or elsewhere: HTTP/1.1, WebSocket and MCP.

Process: the proxy.
May import: sandboxes, sandboxes.ipc, sandboxes.linux.
"""
