"""The harness endpoint: runs an agent inside its sandbox, and brings its requests to the rollout's own model.

Process: the proxy. `turns` is pure.
May import: proxy, proxy.compat, proxy.dialects, proxy.execution, proxy.http, proxy.tree, sandboxes,
sandboxes.tool_clients.
"""
