"""The shapes of REST responses, as pydantic models. Pure.

Process: the proxy.
"""
