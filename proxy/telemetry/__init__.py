"""Counters, histograms and per-call timings. Pure.

Process: the proxy.
May import: proxy.tree, sandboxes.
"""
