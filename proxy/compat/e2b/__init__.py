"""The E2B sandbox API, so that E2B's unmodified SDKs can use rollouts as their sandboxes.

Process: the proxy.
May import: proxy, proxy.compat, proxy.dialects, proxy.execution, proxy.http, proxy.tree, sandboxes,
sandboxes.tool_clients.
"""
