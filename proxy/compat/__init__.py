"""APIs of other products, served to their unmodified clients.

Process: the proxy.
"""
