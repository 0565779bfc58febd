"""Recorded workloads, and the runner that sends them through a proxy (`forkpoint replay`).

Process: the `forkpoint replay` command.
May import: sandboxes.
"""
