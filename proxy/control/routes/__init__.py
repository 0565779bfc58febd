"""The REST routes, one module for each resource.

Process: the proxy.
"""
