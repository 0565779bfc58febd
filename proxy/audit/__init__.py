"""Audits: recorded calls are executed again, and their answers are compared with the records.

Process: the proxy.
"""
