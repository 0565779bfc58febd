"""The `video` driver: each video is prepared once, then answers queries from its index.

Process: the proxy; `worker_engine` runs in the worker processes.
May import: sandboxes, sandboxes.ipc, sandboxes.linux, sandboxes.tool_clients, sandboxes.workers.
"""
