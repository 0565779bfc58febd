"""Connections between members: proofs of the secret, then HTTP: requests that are passed on, and streams.

Process: the proxy, when it is one member of a cluster.
May import: proxy, proxy.cluster.postgres, proxy.http, sandboxes, sandboxes.tool_clients.
"""
