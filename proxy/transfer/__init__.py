"""Export and import: a task's trees, and optionally their sandbox states, as one file.

Process: the proxy.
"""
