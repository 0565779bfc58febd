"""The Docker Engine API, so that any Docker client can use a rollout's sandbox as its container.

Process: the proxy.
"""
