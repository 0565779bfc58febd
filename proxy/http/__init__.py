"""ASGI and HTTP helpers that every endpoint shares: addresses, access, streaming, error responses, uploads.

Process: the proxy.
"""
