"""Sandboxes run tool calls: the driver contract, its values, and one package for each driver.

Process: the proxy.
"""
