"""Copies of this machine's bash and of its libraries, from which the anchor of each sandbox is loaded.

Process: the proxy.
May import: sandboxes.linux, sandboxes.rights.
"""
