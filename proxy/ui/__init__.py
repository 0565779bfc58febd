"""The web page at `/ui`: static files, and the JSON routes that only the page needs.

Process: the proxy.
"""
