"""The `local` driver's parts: namespaces, overlay layers, and a live shell, with no daemon.

`launcher` and everything it imports run in one small process that knows nothing of asyncio or pydantic: each sandbox's
pid 1 is a fork of it, and pays in memory and in milliseconds for what it imports.
"""
