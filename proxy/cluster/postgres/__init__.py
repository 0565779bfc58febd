"""The cluster's PostgreSQL database: members, owners of tasks and logs. The only room of the proxy that uses psycopg.

Process: the proxy, when it is one member of a cluster.
May import: sandboxes.
"""
