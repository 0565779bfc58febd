"""The proxy between agents and their tools: it records calls in trees and answers the ones it knows.

Process: the proxy.
"""
