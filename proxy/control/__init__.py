"""The REST API for people and trainers: it shows trees, rollouts and costs, and operates on them.

Process: the proxy.
"""
