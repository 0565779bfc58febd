"""The E2B sandbox API, so that E2B's unmodified SDKs can use rollouts as their sandboxes.

Process: the proxy.
"""
