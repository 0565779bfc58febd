"""Links between members: one TCP connection to each peer, which carries questions, their answers and streams.

Process: the proxy, when it is one member of a cluster.
May import: proxy.cluster.postgres, sandboxes.
"""
