"""Copies of a base's bash and of its libraries, from which a `local` sandbox's anchor is loaded.

Process: the proxy; `facts` also runs in pid 1.
May import: sandboxes.linux.
"""
