"""The `local` driver: Linux namespaces and overlay layers without a daemon.

Process: the proxy; `launcher` and `init` run in a fork server and as pid 1 of each sandbox.
"""
