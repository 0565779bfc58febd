"""The `sqlite` driver: a private clone of SQLite database files for each sandbox.

Process: the proxy; `worker_engine` runs in the worker processes.
May import: sandboxes, sandboxes.ipc, sandboxes.linux, sandboxes.sql, sandboxes.workers.
"""
