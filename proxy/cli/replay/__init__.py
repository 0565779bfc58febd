"""Recorded workloads are sent through a proxy again, and their answers are compared: `forkpoint replay`.

Process: the `forkpoint replay` command.
May import: proxy, proxy.cli, proxy.tree, sandboxes.
"""
