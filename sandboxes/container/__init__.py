"""The `container` driver: sandboxes in Docker containers.

Process: the proxy; `keeper` runs beside each container.
"""
